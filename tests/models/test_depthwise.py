"""The depthwise convolution and its gradients equal XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models.depthwise import depthwise
from vit_jax.models.model_card import traced_multiply_adds


def convolve(x, kernel):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1],
        preferred_element_type=jnp.float32,
    ).astype(x.dtype)


def random_case(shape, sides, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = shape, (*sides, 1, shape[-1]), shape
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize(
    "shape, sides",
    [
        ((2, 9, 13, 5), (7, 7)),
        # The columns are processed in two parts; the second part is shorter.
        ((1, 4, 31, 3), (7, 7)),
        # The kernel is larger than the images, and the last part of the batch is smaller.
        ((17, 5, 3, 2), (7, 7)),
        ((3, 1, 1, 4), (7, 7)),
        ((2, 8, 6, 3), (3, 5)),
    ],
)
def test_values_and_gradients_are_the_convolutions(shape, sides):
    x, kernel, gradient = random_case(shape, sides)
    ours, ours_back = jax.vjp(depthwise, x, kernel)
    theirs, theirs_back = jax.vjp(convolve, x, kernel)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    for mine, other in zip(ours_back(gradient), theirs_back(gradient), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


def test_sums_of_bfloat16_are_float32():
    x = jnp.ones((2, 20, 20, 3), jnp.bfloat16)
    kernel = jnp.ones((7, 7, 1, 3), jnp.bfloat16)
    (of_x, of_kernel) = jax.vjp(depthwise, x, kernel)[1](x)
    assert of_x.dtype == of_kernel.dtype == jnp.bfloat16
    assert of_x[0, 10, 10, 0] == 49
    # A sum of ones in bfloat16 would stop at 256.
    assert of_kernel[3, 3, 0, 0] == 2 * 20 * 20 and of_kernel[0, 3, 0, 0] == 2 * 17 * 20


def test_gradients_are_the_same_with_rematerialization():
    x, kernel, _ = random_case((2, 9, 6, 3), (7, 7))

    def loss(x, kernel):
        return (jnp.tanh(depthwise(x, kernel)) ** 2).sum()

    again = jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))(x, kernel)
    for mine, other in zip(again, jax.grad(loss, argnums=(0, 1))(x, kernel), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


def test_multiply_adds_are_the_convolutions_on_every_device():
    x, kernel, gradient = random_case((2, 9, 6, 3), (7, 7))

    def counted(function):
        return traced_multiply_adds(
            lambda *given: jax.vjp(function, *given[:2])[1](given[2]), *arguments
        )

    arguments = x, kernel, gradient
    assert (
        counted(depthwise) == counted(convolve) > 2 * traced_multiply_adds(convolve, x, kernel) > 0
    )
