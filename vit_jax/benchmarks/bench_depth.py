"""Training steps with stochastic depth: of a drawn subset of the images beside each image by
chance.
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


def measure(**values) -> None:
    """Prints, for each model, FLOPs and time of steps at two rates; `values` are those of
    `compare`.
    """
    compare(STEPS, **values)
