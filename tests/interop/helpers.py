"""Models with random parameters, to be written and compared."""

from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from vit_jax.interop.checkpoint import build, complete, params_of, save, skeleton
from vit_jax.models import model_factory


def described(name: str, **arguments) -> tuple[type, dict]:
    """The class that a name stands for, and all arguments of the model."""
    factory = model_factory(name, **(dict(num_classes=1000, image_size=224) | arguments))
    return factory.func, complete(factory.func, factory.keywords)


def random_model(name: str, **arguments) -> nnx.Module:
    """A model whose every parameter is random, so that none can be left out unseen."""
    rng = np.random.default_rng(0)
    model, values = described(name, **arguments)

    def draw(path, shape):
        part = path.split("/")[-1]
        if part == "kernel":
            return rng.normal(0, np.prod(shape[:-1]) ** -0.5, shape).astype(np.float32)
        return (rng.normal(0, 0.1, shape) + (part == "scale")).astype(np.float32)

    _, shapes = skeleton(model, values)
    return build(model, values, {path: partial(draw, path, shape) for path, shape in shapes.items()})


def random_images(model: nnx.Module, count: int = 2) -> np.ndarray:
    """Images that a model takes."""
    shape = (count, *model.image_size, model.channels)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def write(model: nnx.Module, destination: Path, library: str, name: str, **arguments) -> Path:
    """Writes a model that was made by `name` and `arguments`."""
    save(destination, library, *described(name, **arguments), params_of(model).get)
    return destination


def logits_of(model: nnx.Module, images: np.ndarray) -> np.ndarray:
    """Compiled as one program, the parameters its arguments."""
    graphdef, params = nnx.split(model)
    return np.asarray(jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))(params, images))
