"""Helpers for tests of objectives: small models, their objectives, and random images."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.config import base_config
from vit_jax.models import abstract, create_model, model_factory
from vit_jax.runs.frozen_model import open_frozen
from vit_jax.training.objectives import make_objective

SMALL = dict(dim=16, depth=2, mlp_dim=32, heads=2)
DECODER = dict(decoder_dim=16, decoder_depth=2, decoder_heads=2)
PLAIN_VIEWS = dict(jitter=(0.0,) * 4, grey=0.0, blur=(0.0,) * 3, solarize=(0.0,) * 3, local_crops=0)


def small(model: str) -> dict:
    """Returns arguments that make a ViT small, and none for other models."""
    return SMALL if "ViT" in model else {}


def dotted(name: str, **values) -> dict:
    """Returns config keys and values that select an objective and set its options.

    Options of a teacher get the prefix `objective.`, all others the objective's name. Views of DINO
    are not distorted and there are no local crops, unless `values` has such options.
    """
    own = PLAIN_VIEWS | values if name == "dino" else values
    keys = {key: f"objective.{key}" for key in ("teacher", "teacher_size", "teacher_features")}
    options = {keys.get(key, f"{name}.{key}"): value for key, value in own.items()}
    return {"objective.name": name} | options


def set_objective(config: ConfigDict, name: str, **values) -> None:
    """Sets a config's objective and options (see `dotted`), with a small decoder."""
    decoder = {key: x for key, x in DECODER.items() if key in config.get(name, {})}
    config.update_from_flattened_dict(dotted(name, **decoder | values))


def config_of(name: str, **values) -> ConfigDict:
    config = base_config()
    set_objective(config, name, **values)
    return config


def make(name: str, *, image_size=(16, 24), model="ViT-Ti/4", options=None, **values):
    """Returns a small model and its objective, with noise added to all parameters."""
    return _make(name, image_size, model, tuple((options or {}).items()), tuple(values.items()))


@functools.cache
def _make(name, image_size, model, options, values):
    vit = create_model(model, num_classes=0, image_size=image_size, **small(model) | dict(options))
    objective = make_objective(config_of(name, **dict(values)), vit, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    return noisy(vit, rng), noisy(objective, rng)


def noisy(module, seed: int | np.random.Generator = 0, deviation: float = 0.3):
    """Adds normal noise to all parameters, so that none is zero, and returns the module."""
    rng = np.random.default_rng(seed)
    add = jax.tree.map(
        lambda x: np.asarray(x) + rng.normal(0, deviation, x.shape).astype(np.float32),
        nnx.state(module),
    )
    nnx.update(module, add)
    return module


def with_frozen(config: ConfigDict, model):
    """Returns the config's objective, with its frozen model and with noisy parameters."""
    found = open_frozen(config)
    objective = noisy(make_objective(config, model, rngs=nnx.Rngs(0), frozen=found.model), 1)
    objective.frozen = nnx.merge(nnx.graphdef(found.model), found.read())
    return objective


def batch_of(objective, images=None):
    """Returns square images (by default 3 random ones) with the objective's random numbers."""
    images = random_images(3, 16, 16) if images is None else images
    return prepare(objective, {"image": images}, keys(len(images)))


def refused(name: str, model: str = "ViT-Ti/4", image_size=16, options=None, **values) -> None:
    """Builds an objective without allocating parameters, so that its errors can be tested."""
    sizes = small(model) | (options or {})
    vit = abstract(model_factory(model, num_classes=0, image_size=image_size, **sizes))
    abstract(functools.partial(make_objective, config_of(name, **values), vit))


def keys(images: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), images)


def random_images(images: int = 4, height: int = 16, width: int = 24) -> jax.Array:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(256, size=(images, height, width, 3), dtype=np.uint8))


# Compiled: without compilation, the operations take five times as long.
prepare = jax.jit(lambda objective, batch, keys: objective.prepare(batch, keys))
predict = jax.jit(lambda objective, model, batch: objective.predict(model, batch))
losses = jax.jit(lambda objective, model, batch: objective(model, batch))
pictures = jax.jit(lambda objective, model, batch: objective.pictures(model, batch))
