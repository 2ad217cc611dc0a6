"""Our schedules, parameter groups, initial values and losses, with the names of `theirs.py`."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.test_config import load
from vit_jax.models import abstract, create_model, model_factory
from vit_jax.models.vit import FAMILY as VIT
from vit_jax.parallel.sharding import path_name
from vit_jax.training.averages import cosine_share
from vit_jax.training.objectives.block_masked import BlockMasked
from vit_jax.training.objectives.dino import DINO
from vit_jax.training.objectives.hidden_pixels import HiddenPixels
from vit_jax.training.objectives.objective import StepContext
from vit_jax.training.objectives.prototypes import PrototypeHead, koleo, sinkhorn
from vit_jax.training.optimizer import DECAYED, make_optimizer
from vit_jax.training.schedule import make_schedule, make_weight_decay

Cases = dict[str, dict[str, list[float]]]  # Lists of numbers by case and name.

# Allowed differences, relative to the largest number of a row, by kind of case or by row. For
# initial values, this is the bound for arrays of 10,000 random numbers and more. For smaller
# arrays, it grows with the inverse root of their size.
ALLOWED = dict(schedules=1e-6, warm_up=6e-3, groups=1e-6, first_values=0.03, losses=1e-5)

# Steps of an epoch. The authors' warm-up ends one step earlier, which changes a warm-up of 10
# epochs by 1 / 199.
EPOCH = 20
# Epochs of the run, of the learning rate's warm-up, and of the teacher temperature's warm-up.
LENGTHS = {
    "dino": (100, 10, 0),
    "dinov2": (100, 10, 30),
    "dinov3": (100, 10, 30),
    "beit:task=pretrain_i1k,teacher=x": (800, 10, 0),
    "beit:task=finetune": (100, 20, 0),
    "mae_l16": (800, 40, 0),
}

DIM, DEPTH, HEADS, SIZE, PATCH = 384, 2, 6, 64, 16
SHAPE = dict(dim=DIM, depth=DEPTH, mlp_dim=4 * DIM, heads=HEADS, image_size=SIZE, num_classes=0)
# Arguments of the compared models by config, in addition to `SHAPE`.
MODELS = {
    "dino": dict(initialization="deit"),
    "dinov2": dict(initialization="dinov2", layer_scale=1e-5),
    "dinov3": dict(initialization="deit", layer_scale=1e-5, position="none", rope="dinov3"),
    "beit:task=pretrain_i1k,teacher=x": dict(
        initialization="beit", layer_scale=0.1, position="bias", position_at="shared", qkv_bias="qv"
    ),
    "eva": dict(initialization="eva", qkv_bias="qv"),
    "eva02:model=EVA02-B/14": dict(initialization="eva02"),
}
# Models whose parameter groups are compared: those above, and two that are fine-tuned with layer
# decay.
GROUPS = MODELS | {
    "beit:task=finetune": dict(layer_scale=0.1, position="bias", qkv_bias="qv"),
    "mae_finetune": dict(),
}
PROTOTYPES = 128


def sampled(steps: int, warmup: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the updates, counted from 1, at which schedules are compared.

    The first array is within the learning rate's warm-up, the second after it.
    """
    return np.linspace(1, warmup, 10).astype(int), np.linspace(warmup + 1, steps, 20).astype(int)


def schedules(name: str) -> dict[str, list[float]]:
    """Returns the values of all schedules of the config's run, with epochs of `EPOCH` steps."""
    file, _, argument = name.partition(":")
    config = load(file, argument)
    epochs, warmup, temperature = (EPOCH * count for count in LENGTHS[name])
    config.optimizer.warmup_steps = warmup
    first, after = sampled(epochs, warmup)
    updates = np.concatenate([first, after])
    decay = make_weight_decay(config.optimizer, epochs)
    rate = jax.vmap(make_schedule(config.optimizer, epochs))
    found = {"warm_up": rate(first), "learning_rate": rate(after)}
    if callable(decay):
        found["weight_decay"] = decay(updates)
    values = config.dino
    if config.objective.name == "dino":
        share = cosine_share(values.teacher_momentum, epochs, values.teacher_momentum_end)
        found["teacher_momentum"] = 1 - share(updates)
    if temperature:
        ends = values.teacher_temperature, values.teacher_temperature_end
        of = SimpleNamespace(temperatures=(*ends, temperature))
        found["teacher_temperature"] = DINO.temperature(of, updates)
    return {key: np.asarray(x, np.float64).tolist() for key, x in found.items()}


def weights_of(name: str) -> dict[str, Any]:
    """Returns the shapes of the parameters of the model and of its objective, as in a run."""
    lengths = {"dinov3": "free", "dinov2": "learned"}.get(name, "one")
    options = SHAPE | GROUPS[name]
    params = nnx.to_pure_dict(nnx.state(abstract(model_factory(f"ViT-S/{PATCH}", **options))))
    if name == "mae_finetune":
        return {"params": params, "extra": {}}
    rngs = nnx.Rngs(0)
    if name.startswith("dino"):
        head = PrototypeHead(DIM, DIM, 64, PROTOTYPES, lengths, rngs=rngs)
    else:
        head = nnx.Linear(DIM, 64, rngs=rngs)
    own = {"head": nnx.to_pure_dict(nnx.state(head)), "mask": np.zeros((1, 1, DIM))}
    if name == "dino":
        del own["mask"]
    return {"params": params, "extra": {"objective": own}}


def groups(name: str) -> dict[str, list[float]]:
    """Returns the factor on each parameter's learning rate, and 1 if its weights decay."""
    file, _, argument = name.partition(":")
    config = load(file, argument).optimizer
    plain = dict(name="sgd", beta1=0.0, clip_norm=0.0, clip="global", weight_decay=0.0)
    config.update(plain)
    stem = (DINO if file.startswith("dino") else BlockMasked).stem
    optimizer = make_optimizer(
        config,
        lambda t: 1.0,
        weight_decay=0.0,
        layer=VIT.layer(None),
        embedding=VIT.embedding,
        stem=stem,
    )
    ones = jax.tree.map(lambda x: jnp.ones(x.shape), weights_of(name))
    updates, _ = optimizer.update(ones, optimizer.init(ones), ones)
    decays = DECAYED[config.decay](ones)
    return {
        path_name(path): [float(-np.ravel(x)[0]), float(decay)]
        for (path, x), decay in zip(
            jax.tree.leaves_with_path(updates), jax.tree.leaves(decays), strict=True
        )
    }


def first_values(name: str) -> dict[str, list[float]]:
    """Returns the std, mean absolute value and size of each array with random initial values.

    The mean absolute value divided by the std is 0.80 for normal values, and 0.87 for uniform ones.
    """
    options = SHAPE | MODELS[name] | dict(pooling="gap", cls_token=True, fc_norm=False)
    if name.startswith("dino"):
        options |= dict(pooling="cls", cls_token=False)
    model = create_model(f"ViT-S/{PATCH}", **options)
    params = nnx.to_pure_dict(nnx.state(model))
    if name.startswith("dino"):
        lengths = "free" if name == "dinov3" else "one"
        head = PrototypeHead(DIM, DIM, 64, PROTOTYPES, lengths, rngs=nnx.Rngs(1))
        params["head"] = nnx.to_pure_dict(nnx.state(head))
    found = {path_name(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}
    return {path: spread(x) for path, x in found.items() if np.ptp(x) > 0}


def spread(x: np.ndarray) -> list[float]:
    """Returns the standard deviation, mean absolute value and size of an array."""
    return [float(x.std()), float(np.abs(x).mean()), x.size]


def draw(*shape: int, seed: int) -> np.ndarray:
    """Returns random numbers that are the same on both sides."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Given(nnx.Module):
    """A model whose features and patches are its inputs times a kernel.

    Student and teacher have different kernels. An image is `[1 + patches, width]`: its features,
    followed by its patches.
    """

    patch_size = 1

    def __init__(self, kernel: np.ndarray):
        self.kernel, self.grid = nnx.Param(jnp.asarray(kernel)), (3, 3)

    def resized(self, size: Any) -> "Given":
        """Returns the model itself, which has no image size."""
        return self


class Identity(nnx.Module):
    """A head that returns its input as logits."""

    def __init__(self, count: int):
        self.count = count

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class GivenDINO(DINO):
    """The DINO objective on the outputs of `Given`, without heads."""

    def __init__(self, **values: Any):
        self.features, self.steps, self.grid = WIDTH, 10, (3, 3)
        self.head, self.patch_head, self.mask = Identity(WIDTH), None, None
        self.temperatures, self.frozen_steps, self.most_masked = (0.07, 0.07, 0), 0, 4
        self.centring, self.global_crops, self.local_crops, self.local_size = "mean", 2, 0, 1
        self.patch_weight = self.koleo_weight = self.gram_weight = 0.0
        self.koleo_group, self.gram_updates = None, (0, 1, 0)
        for name, value in values.items():
            setattr(self, name, value)

    def see(self, model, images, rngs=None, patches=False, masked=None):
        x = images @ model.kernel[...]
        return x[..., 0, :], x[..., 1:, :] if patches else None


class GivenPixels(HiddenPixels):
    """MAE's loss with predictions that are in the batch."""

    def predict(self, model, batch, rngs=None):
        return batch["predicted"]


WIDTH, BATCH = 12, 8
STUDENT, TEACHER = draw(WIDTH, WIDTH, seed=10) / 4, draw(WIDTH, WIDTH, seed=11) / 4
IMAGES, LOCAL = draw(BATCH, 2, 10, WIDTH, seed=12), draw(BATCH, 3, 10, WIDTH, seed=13)
CENTRE = draw(WIDTH, seed=14) / 10
MASKED = np.sort(
    np.random.default_rng(15).permuted(np.tile(np.arange(9), (BATCH, 1)), axis=1)[:, :4], axis=1
)
COUNTS = 1 + np.arange(BATCH) % 4
VIEW = np.arange(BATCH) % 2
PIXELS, PREDICTED = draw(2, 16, 16, 3, seed=16), draw(2, 16, 48, seed=17)
HIDDEN = np.random.default_rng(18).permuted(np.tile(np.arange(16), (2, 1)), axis=1)[:, 4:]


def losses() -> dict[str, list[float]]:
    """Returns losses of the same numbers, and the teacher's assignments after Sinkhorn-Knopp."""
    model, kept = Given(STUDENT), {"kernel": jnp.asarray(TEACHER)}
    memory = {
        "teacher": kept,
        "teacher_head": {},
        "gram": kept,
        "centre": CENTRE,
        "patch_centre": CENTRE,
    }
    memory |= {"mean": np.zeros(WIDTH, np.float32), "used": np.zeros(WIDTH, np.float32)}
    now = StepContext(None, memory, 1)
    batch = {"image": jnp.asarray(IMAGES), "local": jnp.asarray(LOCAL)}
    batch |= {"masked_view": jnp.asarray(VIEW), "positions": jnp.asarray(MASKED)}
    batch |= {"chosen": jnp.arange(4) < COUNTS[:, None]}
    views = GivenDINO(local_crops=3)(model, batch, now).each
    patches = GivenDINO(patch_weight=1.0)(model, batch, now).metrics["patch_loss"]
    gram = GivenDINO(patch_weight=1.0, gram_weight=1.0)(model, batch, now).metrics["gram"]
    whole = np.concatenate([np.setdiff1d(np.arange(16), row)[None] for row in HIDDEN])
    order = jnp.asarray(np.concatenate([whole, HIDDEN], axis=1))
    pixels = GivenPixels((4, 4), 4, 0.75, True)
    plain = SimpleNamespace(normalize=lambda x: x)
    found = {"image": jnp.asarray(PIXELS), "order": order}
    found["predicted"] = jnp.take_along_axis(
        jnp.asarray(PREDICTED), jnp.asarray(HIDDEN)[..., None], axis=1
    )
    return {
        "dino": [float(views.mean())],
        "ibot": [float(patches.mean() / 2)],  # The mean over both views, of which one is masked.
        "gram": [float(gram.mean())],
        "koleo": [float(koleo(IMAGES[:, 0, 0]).mean())],
        "sinkhorn": np.asarray(sinkhorn(IMAGES[:, 0, 0] / 0.07, jnp.ones(BATCH))).ravel().tolist(),
        "mae": [float(pixels(plain, found).each.mean())],
    }


def cases() -> Cases:
    """Returns all of our numbers."""
    found = {f"{name} schedules": schedules(name) for name in LENGTHS}
    found |= {f"{name} groups": groups(name) for name in GROUPS}
    found |= {f"{name} first_values": first_values(name) for name in MODELS}
    return found | {"all losses": losses()}
