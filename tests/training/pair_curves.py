"""Short trainings on images and captions by this project and by big_vision's `siglip.py`.

Parameters have big_vision's names and shapes. Parameters and batches are drawn with NumPy.
"""

import jax
import numpy as np
from flax import traverse_util

from tests.training import curves
from vit_jax.config import base_config
from vit_jax.parallel.mesh import make_mesh, to_devices
from vit_jax.training.program import make_program

VOCABULARY, LENGTH = 258, 12
# big_vision's weight decay is relative to the peak learning rate.
THEIRS = dict(
    optax_name="big_vision.scale_by_adafactor",
    optax=dict(beta2_cap=0.95),
    lr=1e-3,
    wd=1e-4,
    grad_clip_norm=1.0,
    schedule=dict(warmup_steps=10, decay_type="cosine"),
)
OURS = dict(
    **dict(name="adafactor", beta2=0.95, moment_dtype="bfloat16", learning_rate=1e-3),
    **dict(weight_decay=0.1, clip_norm=1.0, schedule="cosine", warmup_steps=10, count_from=0),
)


def batch(step: int) -> dict[str, np.ndarray]:
    """Returns noisy images with the pattern of their class, and tokens that depend on the class."""
    found = curves.batch(step)
    labels = found.pop("labels")[:, 0]
    words = np.random.default_rng(5).integers(2, VOCABULARY, (curves.CLASSES, LENGTH))
    return found | {"text": words[labels].astype(np.int32)}


def draw(shapes: dict[str, tuple[int, ...]], perturbed: int = 0) -> dict[str, np.ndarray]:
    """Returns random values for big_vision's parameters; temperature and bias are fixed."""
    values = curves.draw(shapes, perturbed)
    return values | {
        "t": np.log(np.full(1, 10.0, np.float32)),
        "b": np.full(1, -2.71, np.float32),
    }


def convert(values: dict[str, np.ndarray]) -> tuple[dict, dict]:
    """Returns the image tower's and the objective's parameters under this project's names."""

    def of(tower):
        return {k.removeprefix(f"{tower}/"): x for k, x in values.items() if k.startswith(tower)}

    image, text = of("img"), of("txt")
    embedding = text.pop("Embed_0/embedding")
    text = {name.replace("Encoder_0/", "Transformer/"): x for name, x in text.items()}
    made = traverse_util.flatten_dict(curves.convert(text), sep="/")
    made["token_embedding/embedding"] = embedding
    made["position_embedding/embedding"] = made.pop("position_embedding/table")[0]
    own = {"text": traverse_util.unflatten_dict(made, sep="/")}
    own |= {"logit_scale": values["t"][0], "logit_bias": values["b"][0]}
    return curves.convert(image), own


def our_losses(values: dict[str, np.ndarray]) -> list[float]:
    """Returns the loss of each update of this project's training step.

    Args:
      values: parameters under big_vision's names.
    """
    config = base_config()
    sizes = dict(dim=curves.DIM, depth=curves.DEPTH, mlp_dim=curves.HIDDEN, heads=curves.HEADS)
    config.model.update(dict(name="ViT-Ti/8", patch_size=curves.PATCH, pooling="map", **sizes))
    config.batch_size, config.data.image_size, config.data.flip = curves.BATCH, curves.SIZE, False
    config.objective.name = "contrastive"
    config.contrastive.update({f"text_{name}": value for name, value in sizes.items()})
    config.contrastive.text_length = LENGTH
    config.optimizer.update(OURS)
    program = make_program(config, num_classes=0, steps=curves.STEPS, mesh=make_mesh(config.mesh))
    image, own = convert(values)
    state, losses = program.initial_state(0, image, objective=own), []
    for step in range(curves.STEPS):
        state, sums = program.train_step(
            state, program.initial_metrics(), to_devices(batch(step), program.mesh)
        )
        losses.append(sums["loss"])
    return [float(loss) for loss in jax.device_get(losses)]
