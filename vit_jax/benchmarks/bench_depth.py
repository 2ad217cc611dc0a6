"""Compares the cost of the two kinds of stochastic depth.

`depth_by=image` computes a residual branch for all images, and drops the result of each image at
random. `depth_by=subset` computes a residual branch only for a random subset of the images.
"""

from vit_jax.benchmarks.bench_train import compare

STEPS = {
    f"{depth_by}, {rate}": {
        "model.depth_by": depth_by,
        "model.stochastic_depth": rate,
        "model.uniform_depth": True,
    }
    for rate in (0.3, 0.4)
    for depth_by in ("image", "subset")
}


def measure(**values) -> dict:
    """Prints and returns FLOPs and time of training steps with both kinds of stochastic depth.

    Each kind is measured with the drop rates 0.3 and 0.4. `values` are arguments of `compare`.
    """
    return compare(STEPS, **values)
