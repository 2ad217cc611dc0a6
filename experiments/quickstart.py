"""The quickstart over several seeds: python -m vit_jax.experiment quickstart --out=/tmp/quickstart_seeds"""

import statistics

from vit_jax.runs.study import Experiment, markdown_table


def seeds(study):
    """A run of configs/quickstart.py for each seed."""
    return {("seed", seed): study.job(f"seed{seed}", seed=seed) for seed in study.options["seeds"]}


def table(figures):
    """Test accuracies, and their mean and deviation."""
    accuracies = list(figures.values())
    deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    rows = [(seed, f"{accuracy:.2%}") for seed, accuracy in figures.items()]
    mean = f"{statistics.mean(accuracies):.2%} ± {100 * deviation:.2f}"
    return markdown_table(("seed", "test accuracy"), [*rows, ("mean", mean)])


EXPERIMENT = Experiment(
    claim="The quickstart reads handwritten digits.",
    stages=(seeds,),
    read=lambda study: study.accuracies("seed"),
    table=table,
    options=dict(seeds=dict(type=int, nargs="+", default=[0, 1, 2])),
    needs="nothing; a minute and a half a seed on two cores",
)
