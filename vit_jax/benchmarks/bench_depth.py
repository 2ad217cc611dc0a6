"""Compares the cost of both kinds of stochastic depth, `depth_by=image` and `depth_by=subset`."""

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


def measure(**values) -> None:
    """Prints FLOPs and time of training steps with both kinds of stochastic depth, at two rates.

    Args:
      **values: arguments of `bench_train.compare`.
    """
    compare(STEPS, **values)
