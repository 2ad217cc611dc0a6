"""A small model, an objective for it, and images."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.config import base_config
from vit_jax.models import abstract, create_model, model_factory
from vit_jax.training.objectives import make_objective

SMALL = dict(dim=16, depth=2, hidden=32, heads=2)
DECODER = dict(decoder_dim=16, decoder_depth=2, decoder_heads=2)


def small(model: str) -> dict:
    """Arguments that make a ViT small; other models' tests have their own."""
    return SMALL if "ViT" in model else {}


def config_of(name: str, **values) -> ConfigDict:
    config = base_config()
    config.objective.update(dict(name=name, **DECODER) | values)
    return config


def make(name: str, *, image_size=(16, 24), model="ViT-Ti/4", options=None, **values):
    """The model and its objective, with parameters that are not small or zero anywhere."""
    return _make(name, image_size, model, tuple((options or {}).items()), tuple(values.items()))


@functools.cache
def _make(name, image_size, model, options, values):
    vit = create_model(model, num_classes=0, image_size=image_size, **small(model) | dict(options))
    objective = make_objective(config_of(name, **dict(values)), vit, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for module in (vit, objective):
        noisy = jax.tree.map(
            lambda x: np.asarray(x) + rng.normal(0, 0.3, x.shape).astype(np.float32), nnx.state(module)
        )
        nnx.update(module, noisy)
    return vit, objective


def refused(name: str, model: str = "ViT-Ti/4", image_size=16, options=None, **values) -> None:
    """Makes an objective for a model that is never allocated."""
    sizes = small(model) | (options or {})
    vit = abstract(model_factory(model, num_classes=0, image_size=image_size, **sizes))
    abstract(functools.partial(make_objective, config_of(name, **values), vit))


def keys(images: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), images)


def random_images(images: int = 4, height: int = 16, width: int = 24) -> jax.Array:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(256, size=(images, height, width, 3), dtype=np.uint8))


# Compiled: one by one the operations take five times as long.
predict = jax.jit(lambda objective, model, batch: objective.predict(model, batch))
losses = jax.jit(lambda objective, model, batch: objective(model, batch))
pictures = jax.jit(lambda objective, model, batch: objective.pictures(model, batch))
