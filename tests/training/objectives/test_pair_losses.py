"""Tests of the losses of image-text pairs against NumPy, on one device and on several."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import FAST_COMPILE
from vit_jax.models.image_text import unit
from vit_jax.options.run import MeshOptions
from vit_jax.parallel.mesh import make_mesh
from vit_jax.training.objectives.pair_losses import Pairs, sigmoid_losses, softmax_losses

BATCH, DIM = 16, 6


def embeddings(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    images, texts = np.random.default_rng(seed).normal(size=(2, BATCH, DIM))
    return tuple(x / np.linalg.norm(x, axis=1, keepdims=True) for x in (images, texts))


def sigmoid_reference(images, texts, scale, bias, keep):
    """Returns the losses of algorithm 1 of Zhai et al., 2023, in float64."""
    logits = scale * images @ texts.T + bias
    signs = 2 * np.eye(len(images)) - 1
    return (np.log1p(np.exp(-signs * logits)) * keep).sum(1)


def softmax_reference(images, texts, scale, keep):
    """Returns the losses of figure 3 of Radford et al., 2021, in float64."""
    logits = scale * images @ texts.T
    rows = np.log((np.exp(logits) * keep).sum(1)) - np.diag(logits)
    columns = np.log((np.exp(logits) * keep[:, None]).sum(0)) - np.diag(logits)
    return (rows + columns) / 2


def gradients_of(loss, arguments, epsilon=1e-5):
    """Returns a function's gradients by central differences, in float64."""
    result = []
    for place, array in enumerate(arguments):
        gradient = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            values = []
            for step in (epsilon, -epsilon):
                changed = [np.array(x) for x in arguments]
                changed[place][index] += step
                values.append(loss(*changed))
            gradient[index] = (values[0] - values[1]) / (2 * epsilon)
        result.append(gradient)
    return result


KEEP = np.arange(BATCH) < BATCH - 3
WEIGHTS = np.where(KEEP, np.linspace(0.5, 2, BATCH), 0)


def check_sigmoid(place) -> None:
    """Asserts that losses and gradients equal NumPy's."""
    images, texts = embeddings()

    def ours(images, texts, scale, bias):
        pairs = Pairs(images, texts, scale, jnp.asarray(KEEP))
        losses, _ = sigmoid_losses(pairs, bias, place)
        return (losses * WEIGHTS).sum(), losses

    def reference(images, texts, scale, bias):
        return (sigmoid_reference(images, texts, scale, bias, KEEP) * WEIGHTS).sum()

    values = images, texts, np.float64(7.0), np.float64(-3.0)
    arrays = [jnp.asarray(x, jnp.float32) for x in values]
    run = jax.jit(jax.value_and_grad(ours, argnums=(0, 1, 2, 3), has_aux=True))
    (_, losses), gradients = run(*arrays)
    want = sigmoid_reference(*values, KEEP)
    np.testing.assert_allclose(losses[:-3], want[:-3], rtol=1e-5)
    for ours_, numpys in zip(gradients, gradients_of(reference, values), strict=True):
        np.testing.assert_allclose(ours_, numpys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mesh", [None, (1, 1)])
def test_sigmoid_loss_and_gradient_are_numpys(mesh):
    check_sigmoid(mesh and mesh_of(*mesh))


def test_softmax_loss_and_gradient_are_numpys():
    images, texts = embeddings(1)

    def ours(images, texts, scale):
        losses, _ = softmax_losses(Pairs(images, texts, scale, jnp.asarray(KEEP)))
        return jnp.where(KEEP, losses * WEIGHTS, 0).sum(), losses

    def reference(images, texts, scale):
        return (softmax_reference(images, texts, scale, KEEP) * WEIGHTS).sum()

    values = images, texts, np.float64(7.0)
    arrays = [jnp.asarray(x, jnp.float32) for x in values]
    (_, losses), gradients = jax.value_and_grad(ours, argnums=(0, 1, 2), has_aux=True)(*arrays)
    np.testing.assert_allclose(losses[:-3], softmax_reference(*values, KEEP)[:-3], rtol=1e-5)
    for ours_, numpys in zip(gradients, gradients_of(reference, values), strict=True):
        np.testing.assert_allclose(ours_, numpys, rtol=1e-4, atol=1e-4)


def check_found(kind: str, mesh=None) -> None:
    """Asserts that an image's own text is compared with the texts of all images except padding."""
    images, texts = (jnp.asarray(x, jnp.float32) for x in embeddings(2))
    texts = texts.at[:4].set(images[:4])
    texts = texts.at[-1].set(images[5])  # Padding is not compared.
    pairs = Pairs(images, texts, jnp.float32(5), jnp.asarray(KEEP))
    if kind == "sigmoid":
        _, found = sigmoid_losses(pairs, jnp.float32(-1), mesh)
    else:
        _, found = softmax_losses(pairs)
    similarities = np.where(KEEP, np.asarray(images @ texts.T), -np.inf)
    want = similarities.argmax(1) == np.arange(BATCH)
    np.testing.assert_array_equal(np.asarray(found)[:-3], want[:-3])
    assert 4 <= want.sum() < BATCH - 3


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_own_text_is_compared_with_all_kept_texts(kind):
    check_found(kind)


def check_ties(kind: str, mesh=None) -> None:
    """Asserts that n equally similar texts count as correct with probability 1/n each."""
    images, texts = (jnp.asarray(x, jnp.float32) for x in embeddings(2))
    texts = texts.at[:6].set(images[:6])
    texts = texts.at[5].set(images[0])  # Two images have the same caption.
    losses = {"sigmoid": lambda pairs: sigmoid_losses(pairs, jnp.float32(-1), mesh)}.get(
        kind, softmax_losses
    )
    _, found = losses(Pairs(images, texts, jnp.float32(5), jnp.asarray(KEEP)))
    np.testing.assert_allclose(found[:6], [0.5, 1, 1, 1, 1, 0])
    constant = jnp.broadcast_to(images[:1], images.shape)
    _, found = losses(Pairs(constant, constant, jnp.float32(5), jnp.asarray(KEEP)))
    np.testing.assert_allclose(found, 1 / KEEP.sum(), rtol=1e-6)


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_equally_similar_texts_are_correct_with_equal_probability(kind):
    check_ties(kind)


def check_memory() -> None:
    """Asserts that a device stores only the logits of its images and one block of texts."""
    mesh, batch, dim = mesh_of(8, 1), 1024, 16

    def loss(images, texts):
        pairs = Pairs(unit(images), unit(texts), jnp.float32(10), jnp.ones(batch, bool))
        return sigmoid_losses(pairs, jnp.float32(-10), mesh)[0].mean()

    shape = jax.ShapeDtypeStruct((batch, dim), jnp.float32)
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(shape, shape).compile().as_text()
    assert "f32[128,128]" in text
    assert "1024,1024]" not in text and "128,1024]" not in text


def mesh_of(data: int, fsdp: int):
    return make_mesh(MeshOptions(data=data, fsdp=fsdp), jax.devices()[: data * fsdp])


EIGHT = """
from tests.training.objectives import test_pair_losses as own
for shape in (4, 2), (8, 1), (2, 4):
    own.check_sigmoid(own.mesh_of(*shape))
own.check_found("sigmoid", own.mesh_of(8, 1))
own.check_ties("sigmoid", own.mesh_of(8, 1))
own.check_memory()
"""


@pytest.mark.slow
def test_eight_devices_compute_the_same_with_one_block_of_logits_at_a_time():
    eight = {
        "XLA_FLAGS": f"{FAST_COMPILE} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", EIGHT],
        cwd=Path(__file__).parents[3],
        env=os.environ | eight,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
