"""The largest model of each family, and its cost: python -m vit_jax.experiment table2 --out=DIR.

At laptop scale it uses those runs of figure 5 that have the largest ViT, BiT or hybrid and the most
steps. The table shows their accuracy, mean few-shot accuracy on four alphabets, compute and seconds
of training. At the paper's scale three ViTs and BiT-L are pre-trained and fine-tuned. Results on
VTAB are in the experiment table9; ReaL accuracy is computed by `vit_jax.evaluate --suite=imagenet`.
"""

from vit_jax.experiment import load
from vit_jax.ledger.laptop import MODELS
from vit_jax.ledger.paper_scale import LARGEST, TASKS
from vit_jax.ledger.stages import transfer
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing, means, ranking

SIZES = {"ViT-H/14, JFT-300M": 518, "ViT-L/16, JFT-300M": 512, "ViT-L/16, ImageNet-21k": 512}


def read(study):
    """Returns the results of the longest finished run of each family's largest model."""
    points, found = load("figure5").read(study)["points"], []
    for members in MODELS.values():
        runs = [point for point in points if point["model"] in members]
        found += sorted(runs, key=lambda point: (members.index(point["model"]), point["steps"]))[
            -1:
        ]
    return found


def finding(figures):
    """Returns a sentence with the models in the order of accuracy, and in the order of time."""
    times = {point["model"]: sum(point["seconds"]) / len(point["seconds"]) for point in figures}
    seconds = ", ".join(f"{model} {times[model]:,.0f} s" for model in sorted(times, key=times.get))
    return f"Accuracy: {ranking(means(figures, 'model'))}. Time of training: {seconds}."


EXPERIMENT = Experiment(
    claim=(
        "The largest Transformer is ahead of the largest ResNet, and takes less compute to "
        "pre-train."
    ),
    place="Table 2",
    runs_of="figure5",
    read=read,
    table=lambda figures: listing(
        figures, ("model", "steps", "exaflops", "seconds"), ("accuracy", "few-shot")
    ),
    finding=finding,
    paper=transfer(LARGEST, TASKS, "table2", SIZES),
)
