"""A dense layer and its gradients equal XLA's, and need no copies of activations on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models.layers import dense_dot, placing


def random(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), dtype)


@pytest.mark.parametrize(
    "rows, inputs, outputs",
    [((2, 5), (6,), (7,)), ((2, 3, 4), (6,), (3, 2, 4)), ((2, 5), (2, 3), (7,)), ((), (6,), (7,))],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_are_those_of_dot_general(rows, inputs, outputs, dtype):
    x, kernel = random(*rows, *inputs, dtype=dtype), random(*inputs, *outputs, dtype=dtype)
    last = range(len(rows), len(rows) + len(inputs))
    numbers = ((tuple(last), tuple(range(len(inputs)))), ((), ()))
    ours, ours_back = jax.vjp(lambda x, kernel: dense_dot(x, kernel, numbers), x, kernel)
    theirs, theirs_back = jax.vjp(
        lambda x, kernel: jax.lax.dot_general(x, kernel, numbers), x, kernel
    )
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    tolerance = 1e-6 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=tolerance, atol=tolerance)
    for mine, other in zip(ours_back(ours), theirs_back(ours), strict=True):
        np.testing.assert_allclose(
            np.float32(mine), np.float32(other), rtol=tolerance, atol=10 * tolerance
        )


def test_the_kernels_gradient_copies_no_activations_on_a_cpu():
    x, kernel, gradient = random(4, 4, 16, 64), random(64, 256), random(4, 4, 16, 256)
    numbers = (((3,), (0,)), ((), ()))

    def of_kernel(x, gradient):
        return jax.vjp(lambda kernel: dense_dot(x, kernel, numbers), kernel)[1](gradient)

    with placing(lambda name, x: x, "cpu"):
        program = jax.jit(of_kernel).lower(x, gradient).compile()
    assert program.memory_analysis().temp_size_in_bytes < x.nbytes
