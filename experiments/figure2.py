"""Results on the groups of VTAB's tasks: python -m vit_jax.experiment figure2 --out=DIR.

It uses the runs of table 9 and averages their accuracies over groups of tasks. At laptop scale the
groups are alphabets with letters similar to the pre-training images, other alphabets, and digits.
The paper's figure has bars without numbers, for ViT, BiT, VIVI and S4L. The bars of the ViTs show
means of results in table 9, so these means are used as published values.
"""

import statistics
from dataclasses import replace

from vit_jax.data.sources.vtab import GROUPS, TASKS
from vit_jax.experiment import load
from vit_jax.ledger.charts import lines
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import means, pivot, ranking

KINDS = {
    "like Latin letters": ("greek", "cyrillic"),
    "other letters": ("armenian", "georgian"),
    "digits": ("digits",),
}
TABLE9 = load("table9")


def read(study):
    """Returns for each start and group of tasks the mean accuracy, with a value for each seed."""
    points, found = TABLE9.read(study), []
    for kind, tasks in KINDS.items():
        for start in dict.fromkeys(point["start"] for point in points):
            of_group = [p["accuracy"] for p in points if p["task"] in tasks and p["start"] == start]
            # Only seeds whose runs are finished for all tasks of the group are used.
            seeds = list(map(statistics.mean, zip(*of_group, strict=False)))
            found += [{"group": kind, "start": start, "accuracy": seeds}] if seeds else []
    return found


def read_at_scale(study):
    """Returns the mean accuracy of each group of tasks, for models whose tasks are all finished."""
    ours, found = TABLE9.paper.read(study), {}
    for group in GROUPS:
        rows = [ours[task.name] for task in TASKS.values() if task.group == group]
        models = [model for model in rows[0] if all(model in row for row in rows)]
        found[group] = {model: statistics.mean(row[model] for row in rows) for model in models}
    return found


EXPERIMENT = Experiment(
    claim="Pre-training helps in each group of tasks.",
    place="Figure 2",
    runs_of="table9",
    read=read,
    table=lambda figures: pivot(figures, "group", "start"),
    draw=lambda study, figures: {"figure2": lines(figures, "group", by=["start"])},
    finding=lambda figures: f"{ranking(means(figures, 'group', 'start'))}.",
    paper=replace(TABLE9.paper, read=read_at_scale, published="figure2"),
)
