"""Few-shot accuracy over the number of pre-training images: python -m vit_jax.experiment figure4 --out=DIR

The runs of figure 3. Least squares on the frozen features of ten images of each character of four alphabets
that were not among the pre-training images; of each run the best of five evaluations, with early stopping.
"""

from vit_jax.ledger.charts import lines
from vit_jax.ledger.laptop import DOWNSTREAM, MODELS, mean_fewshot
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import crossings, pivot


def read(study):
    """The mean over the alphabets of each run's best."""
    names = [f"best fewshot/{name}/10" for name in DOWNSTREAM]
    points = study.points("pretrained", *names)
    return [point | {"accuracy": mean_fewshot(point, "best ")} for point in points]


EXPERIMENT = Experiment(
    claim="Few-shot, ResNets lead on few pre-training images, and larger Transformers on many.",
    place="Figure 4",
    runs_of="figure3",
    read=read,
    table=lambda figures: pivot(figures, "model", "images"),
    draw=lambda study, figures: {
        "figure4": lines(figures, "images", by=["model"], ylabel="10-shot accuracy on other alphabets, %")
    },
    finding=lambda figures: crossings(figures, "images", [members[0] for members in MODELS.values()]),
)
