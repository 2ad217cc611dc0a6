"""Short trainings whose parameters, batches and config values can also be given to big_vision.

Parameters have big_vision's names and shapes. Parameters and batches are drawn with NumPy.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from flax import traverse_util

from vit_jax.config import base_config
from vit_jax.parallel.mesh import make_mesh, to_devices
from vit_jax.training.program import make_program

STEPS, BATCH, SIZE, PATCH, CLASSES = 60, 16, 32, 8, 10
# The width of a head, DIM / HEADS, is 32: the smallest size that Adafactor factors.
DIM, DEPTH, HIDDEN, HEADS = 64, 2, 128, 2
_ATTENTION = "MultiHeadDotProductAttention_0"


class Case(NamedTuple):
    """Config values of one training: big_vision's and this project's."""

    pooling: str
    loss: str
    theirs: dict[str, Any]
    ours: dict[str, Any]


# big_vision's weight decay is relative to the peak learning rate, and its schedules count from 0.
CASES = {
    "adam": Case(
        "gap",
        "sigmoid",
        dict(
            optax_name="scale_by_adam",
            lr=1e-3,
            wd=1e-4,
            grad_clip_norm=1.0,
            schedule=dict(warmup_steps=10, decay_type="cosine"),
        ),
        dict(name="adam", learning_rate=1e-3, weight_decay=0.1, clip_norm=1.0, schedule="cosine"),
    ),
    "adafactor": Case(
        "map",
        "softmax",
        dict(
            optax_name="big_vision.scale_by_adafactor",
            optax=dict(beta2_cap=0.95),
            lr=1e-3,
            wd=1e-4,
            grad_clip_norm=1.0,
            schedule=dict(warmup_steps=10, decay_type="linear", linear_end=1e-2),
        ),
        dict(
            name="adafactor",
            beta2=0.95,
            moment_dtype="bfloat16",
            learning_rate=1e-3,
            end_learning_rate=1e-5,
            weight_decay=0.1,
            clip_norm=1.0,
            schedule="linear",
        ),
    ),
    "sgd": Case(
        "gap",
        "softmax",
        dict(
            optax_name="big_vision.momentum_hp",
            lr=0.03,
            grad_clip_norm=1.0,
            schedule=dict(
                warmup_steps=10, decay_type="stair", steps=[20, 40, 50], mults=[0.1, 0.01, 0.001]
            ),
        ),
        dict(
            name="sgd",
            moment_dtype="bfloat16",
            learning_rate=0.03,
            weight_decay=0.0,
            clip_norm=1.0,
            schedule="stairs",
            # The steps are one below theirs: counted from 0, a stair takes effect one update later.
            stairs=(
                19 / STEPS,
                39 / STEPS,
                49 / STEPS,
            ),
        ),
    ),
}


def batch(step: int) -> dict[str, np.ndarray]:
    """Returns noisy `uint8` images, each with the pattern of its class, and their labels."""
    rng = np.random.default_rng((1, step))
    labels = rng.integers(CLASSES, size=BATCH)
    patterns = np.random.default_rng(2).integers(256, size=(CLASSES, SIZE, SIZE, 3))
    noise = rng.integers(256, size=(BATCH, SIZE, SIZE, 3))
    return {
        "image": ((patterns[labels] + 3 * noise) // 4).astype(np.uint8),
        "labels": labels[:, None].astype(np.int32),
    }


def draw(shapes: dict[str, tuple[int, ...]], perturbed: int = 0) -> dict[str, np.ndarray]:
    """Returns random values for big_vision's parameters.

    If `perturbed` is above 0, each value is changed by a relative 1e-7; `perturbed` is the random
    seed.
    """
    values = {}
    for number, (name, shape) in enumerate(sorted(shapes.items())):
        x = np.random.default_rng((3, number)).standard_normal(shape)
        if name.endswith("kernel"):
            inputs = (
                shape[0] if len(shape) == 2 else DIM if "conv" not in name else np.prod(shape[:-1])
            )
            x *= (PATCH * PATCH * 3 if name.startswith("embedding") else inputs) ** -0.5
        else:
            x = 0.02 * x + name.endswith("scale")
        if perturbed:
            x *= 1 + 1e-7 * np.random.default_rng((4, number, perturbed)).standard_normal(shape)
        values[name] = x.astype(np.float32)
    return values


def convert(values: dict[str, np.ndarray]) -> dict:
    """Returns the parameters under this project's names.

    Queries, keys and values become one array, and so do the keys and values of a pooling head.
    """

    names = {"patch_embedding": "embedding", "norm": "Transformer/encoder_norm", "head": "head"}
    found = {"position_embedding/table": values["pos_embedding"]}

    def fuse(ours, attention, parts):
        for kind, axis in dict(kernel=1, bias=0).items():
            found[f"{ours}/{kind}"] = np.stack(
                [values[f"{attention}/{part}/{kind}"] for part in parts], axis
            )

    for layer in range(DEPTH):
        ours, theirs = f"blocks/{layer:02d}", f"Transformer/encoderblock_{layer}"
        fuse(f"{ours}/attention/qkv", f"{theirs}/{_ATTENTION}", ("query", "key", "value"))
        names[f"{ours}/attention/out"] = f"{theirs}/{_ATTENTION}/out"
        for number in (0, 1):
            names[f"{ours}/norm{number + 1}"] = f"{theirs}/LayerNorm_{number}"
            names[f"{ours}/mlp/fc{number + 1}"] = f"{theirs}/MlpBlock_0/Dense_{number}"
    if "MAPHead_0/probe" in values:
        ours, theirs = "attention_pooling", "MAPHead_0"
        found[f"{ours}/probe"] = values[f"{theirs}/probe"]
        fuse(f"{ours}/key_value", f"{theirs}/{_ATTENTION}", ("key", "value"))
        for part in ("query", "out"):
            names[f"{ours}/{part}"] = f"{theirs}/{_ATTENTION}/{part}"
        names[f"{ours}/norm"] = f"{theirs}/LayerNorm_0"
        for number in (0, 1):
            names[f"{ours}/mlp/fc{number + 1}"] = f"{theirs}/MlpBlock_0/Dense_{number}"
    for ours, theirs in names.items():
        for kind in ("kernel", "scale", "bias"):
            if f"{theirs}/{kind}" in values:
                found[f"{ours}/{kind}"] = values[f"{theirs}/{kind}"]
    assert sum(x.size for x in found.values()) == sum(x.size for x in values.values())
    return traverse_util.unflatten_dict(found, sep="/")


def our_losses(case: Case, values: dict[str, np.ndarray], **optimizer) -> list[float]:
    """Returns the loss of each update of this project's training step.

    Args:
      values: parameters under big_vision's names.
    """
    config = base_config()
    sizes = dict(patch_size=PATCH, dim=DIM, depth=DEPTH, mlp_dim=HIDDEN, heads=HEADS)
    config.model.update(dict(name="ViT-Ti/8", pooling=case.pooling, **sizes))
    config.batch_size, config.data.image_size, config.data.flip = BATCH, SIZE, False
    config.loss.name = case.loss
    config.optimizer.update(dict(warmup_steps=10, count_from=0) | case.ours | optimizer)
    program = make_program(config, num_classes=CLASSES, steps=STEPS, mesh=make_mesh(config.mesh))
    state, losses = program.initial_state(0, convert(values)), []
    for step in range(STEPS):
        state, sums = program.train_step(
            state, program.initial_metrics(), to_devices(batch(step), program.mesh)
        )
        losses.append(sums["loss"])
    return [float(loss) for loss in jax.device_get(losses)]


def furthest(losses: list[float], others: list[float]) -> float:
    """Returns the largest relative difference between two loss curves."""
    return float(np.max(np.abs(np.subtract(losses, others)) / np.abs(others)))
