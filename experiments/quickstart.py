"""The quickstart over several seeds: python -m vit_jax.experiment quickstart --out=DIR."""

from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import markdown_table, spread

SEEDS = (0, 1, 2)


def table(figures):
    """Returns a table with the test accuracy of each seed, and their mean and std."""
    accuracies = figures["accuracy"]
    rows = [
        (seed, f"{accuracy:.2%}")
        for seed, accuracy in zip(figures["seeds"], accuracies, strict=True)
    ]
    return markdown_table(("seed", "test accuracy"), [*rows, ("mean", f"{spread(accuracies)} %")])


EXPERIMENT = Experiment(
    claim="The quickstart reads handwritten digits.",
    stages=(grid("quickstart", {}, lambda study, seed: ("quickstart", {}), SEEDS),),
    read=lambda study: (study.points("quickstart", "accuracy") or [{"seeds": [], "accuracy": []}])[
        0
    ],
    table=table,
    minutes=2,
)
