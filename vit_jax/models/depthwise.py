"""A depthwise convolution that is also fast on CPUs, where XLA's own convolution is slow.

On a CPU the convolution is computed as a sum of shifted elementwise products, which XLA compiles to
one loop over the channels. On other devices it is XLA's convolution. A traced program contains both
variants, and the compiler selects the variant for its device. Model cards count the FLOPs of XLA's
convolution. docs/measurements.md compares the speed of the variants.
"""

import itertools

import jax
import jax.numpy as jnp

# Maximum number of image columns in one iteration of the loop that computes the kernel's gradient.
# This number of columns fits into a core's cache.
COLUMNS = 28
# Minimum number of products that one loop iteration adds up. With fewer products XLA would copy
# each slice.
LEAST = 16


@jax.custom_vjp
def depthwise(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolves each channel separately, zero-padded; on CPUs the sums are float32.

    Args:
      x: `[batch, height, width, channels]`.
      kernel: `[rows, columns, 1, channels]`, rows and columns odd.
    """
    return jax.lax.platform_dependent(x, kernel, cpu=_shifted, default=_convolve)


def _convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1],
    )


def _forward(x, kernel):
    return depthwise(x, kernel), (x, kernel)


def _backward(kept, gradient):
    def on_cpu(x, kernel, gradient):
        of_kernel = _of_kernel(x, gradient, kernel.shape[:2])
        return _shifted(gradient, kernel[::-1, ::-1]), of_kernel.astype(kernel.dtype)

    def elsewhere(x, kernel, gradient):
        (of_x,) = jax.linear_transpose(lambda x: _convolve(x, kernel), x)(gradient)
        (of_kernel,) = jax.linear_transpose(lambda kernel: _convolve(x, kernel), kernel)(gradient)
        return of_x, of_kernel

    return jax.lax.platform_dependent(*kept, gradient, cpu=on_cpu, default=elsewhere)


depthwise.defvjp(_forward, _backward)


@jax.jit
def _shifted(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes the convolution as a sum of shifted images, each times one kernel element.

    The upper and the lower half of the rows are computed apart. XLA would otherwise compute all
    rows again within the layer norm that follows, and store each shifted image for this.
    """
    (height, width), (rows, columns) = x.shape[1:3], kernel.shape[:2]
    padded = _pad(x, rows // 2, columns // 2)
    kernel = kernel[:, :, 0].astype(jnp.float32)

    def of_rows(first, last):
        total = jnp.zeros(())
        for i, j in itertools.product(range(rows), range(columns)):
            total += padded[:, first + i : last + i, j : j + width] * kernel[i, j]
        return total

    halves = [of_rows(0, height // 2), of_rows(height // 2, height)]
    return jnp.concatenate(halves, axis=1).astype(x.dtype)


@jax.jit(static_argnums=2)
def _of_kernel(x: jax.Array, gradient: jax.Array, sides: tuple[int, int]) -> jax.Array:
    """Returns the kernel's gradient, float32 `[rows, columns, 1, channels]`.

    The gradient at kernel position (i, j) is the sum of `x`, shifted by (i, j), times `gradient`
    over all images, rows and columns. XLA would compute this sum slowly, channel by channel.
    Therefore a loop adds a few images and columns in each iteration, and the rows are added after
    the loop.
    """
    batch, height, width, channels = x.shape
    rows, columns = sides
    parts = -(-width // COLUMNS)
    step = -(-width // parts)  # Columns at a time.
    images = -(-LEAST // step)
    turns, more = -(-batch // images), parts * step - width
    x = _pad(x, rows // 2, columns // 2, (turns * images - batch, more))
    gradient = _pad(gradient, 0, 0, (turns * images - batch, more))

    def add(turn, sums):
        first = turn // parts * images, 0, turn % parts * step, 0
        seen = jax.lax.dynamic_slice(x, first, (images, x.shape[1], step + columns - 1, channels))
        times = jax.lax.dynamic_slice(gradient, first, (images, height, step, channels))
        places = [(image, column) for image in range(images) for column in range(step)]
        return [
            total
            + sum(
                seen[b, i : i + height, j : j + columns] * times[b, :, j, None] for b, j in places
            )
            for i, total in enumerate(sums)
        ]

    sums = jax.lax.fori_loop(0, parts * turns, add, [jnp.zeros((height, columns, channels))] * rows)
    return jnp.stack([total.sum(0) for total in sums])[:, :, None]


def _pad(x: jax.Array, rows: int, columns: int, more: tuple[int, int] = (0, 0)) -> jax.Array:
    """Returns `x`, `[batch, height, width, channels]`, as float32 with zero padding.

    Args:
      rows: number of zero rows at the top, and also at the bottom.
      columns: number of zero columns at the left, and also at the right.
      more: a pair: the number of zero images to append to the batch, and the number of zero columns
        at the right in addition to `columns`.
    """
    return jnp.pad(
        x.astype(jnp.float32), ((0, more[0]), (rows, rows), (columns, columns + more[1]), (0, 0))
    )
