"""Helpers that create, write and compare models with random parameters."""

import zlib
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from vit_jax.interop.checkpoint import fill, params_of, sketch
from vit_jax.interop.writing import save
from vit_jax.models import model_options
from vit_jax.models.image_model import ImageModel
from vit_jax.models.model_card import parameter_shapes
from vit_jax.options.model import ImageOptions


def described(name: str, **arguments) -> ImageOptions:
    """Returns the options of the named model."""
    return model_options(name, **(dict(num_classes=1000, image_size=224) | arguments))


def random_model(name: str, **arguments) -> nnx.Module:
    """Returns a model with random parameters, none of them zero, so that each affects the output.

    Each parameter has its own random seed, because `build` reads them on several threads, in any
    order.
    """
    options = described(name, **arguments)

    def draw(path, shape):
        rng = np.random.default_rng(zlib.crc32(path.encode()))
        part = path.split("/")[-1]
        if part == "kernel":
            return rng.normal(0, np.prod(shape[:-1]) ** -0.5, shape).astype(np.float32)
        return (rng.normal(0, 0.1, shape) + (part == "scale")).astype(np.float32)

    model = sketch(options)
    shapes = parameter_shapes(model)
    return fill(model, {path: partial(draw, path, shape) for path, shape in shapes.items()})


def random_images(model: nnx.Module, count: int = 2) -> np.ndarray:
    """Returns random images of the model's size."""
    shape = (count, *model.image_size, model.channels)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def write(model: nnx.Module, destination: Path, library: str, name: str, **arguments) -> Path:
    """Writes a model that was created with `name` and `arguments`."""
    save(destination, library, described(name, **arguments), params_of(model).get)
    return destination


def logits_of(model: nnx.Module, images: np.ndarray) -> np.ndarray:
    """Returns the logits, computed as one compiled program with the parameters as arguments."""
    graphdef, params = nnx.split(model)
    return np.asarray(jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))(params, images))


def torch_logits(torch, model, images) -> np.ndarray:
    """Returns the logits of a PyTorch model for normalized images.

    For models of Transformers without a head, these are the pooled features. Without a pooler, they
    are the class token, and without a class token, the mean over all tokens.
    """
    with torch.no_grad():
        out = model.eval()(torch.from_numpy(np.asarray(images).transpose(0, 3, 1, 2).copy()))
    if isinstance(out, torch.Tensor):
        return out.numpy()
    for name in ("logits", "image_embeds", "pooler_output"):
        if out.get(name) is not None:
            return out[name].numpy()
    tokens = out["last_hidden_state"]
    classed = any(name.endswith("cls_token") for name, _ in model.named_parameters())
    return (tokens[:, 0] if classed else tokens.mean(1)).numpy()


def distance(torch, ours: ImageModel, theirs) -> float:
    """Returns the largest difference of our logits from theirs, relative to the largest logit.

    Theirs are computed in float64, for two images.
    """
    images = random_images(ours)
    expected = torch_logits(torch, theirs.double(), np.float64(ours.normalize(images)))
    expected = expected.reshape(
        len(images), -1
    )  # Convolutional models in Transformers keep axes of size one.
    found = logits_of(ours, images)
    shapes = found.shape[1:], expected.shape[1:]
    assert shapes[0] == shapes[1], f"our output has the shape {shapes[0]}, theirs {shapes[1]}"
    return np.abs(found - expected).max() / np.abs(expected).max()


def randomise(torch, model):
    """Draws all parameters at random, such that activations keep their scale.

    Some scale factors of Swin V2 are above their bound.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("logit_scale"):
                p.copy_(torch.linspace(1, 5, p.numel()).reshape(p.shape))
            elif name.endswith("bias_table"):
                p.copy_(torch.randn(p.shape, generator=generator))
            elif p.ndim < 2 or "token" in name or "pos" in name:
                mean = 1.0 if p.ndim == 1 and name.endswith("weight") else 0.0
                p.copy_(mean + 0.1 * torch.randn(p.shape, generator=generator))
            else:
                p.copy_(torch.randn(p.shape, generator=generator) / p[0].numel() ** 0.5)
    return model.eval()
