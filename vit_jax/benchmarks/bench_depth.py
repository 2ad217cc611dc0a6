"""Compares training steps with stochastic depth: a fixed-size subset of images, or per image."""

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
    """Prints FLOPs and time of each model's steps at two drop rates; arguments as in `compare`."""
    compare(STEPS, **values)
