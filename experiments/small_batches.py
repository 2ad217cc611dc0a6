"""The smallest usable batch of each loss: python -m vit_jax.experiment small_batches --out=DIR.

A small ViT is trained on scikit-learn's digits without labels, with DINO's loss: centred by the
running mean, by Sinkhorn-Knopp, by Sinkhorn-Knopp with KoLeo, or not at all. Each run sees the same
number of images in batches of 2 to 128. The learning rate, and the difference of the teacher's
momentum from 1, are proportional to the batch size. The results are 10 nearest neighbours among the
training images, and the share of used prototypes. There is one seed each.
"""

from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import pivot

BATCHES, IMAGES = (2, 8, 32, 128), 24_000
LOSSES = {
    "mean": {"dino__centring": "mean"},
    "Sinkhorn-Knopp": {"dino__centring": "sinkhorn"},
    "Sinkhorn-Knopp, KoLeo": {"dino__centring": "sinkhorn", "dino__koleo": 0.1},
    "none": {"dino__centring": "none"},
}
PROTOTYPES = 256


def trained(study, loss, batch, seed):
    """Returns the run of a loss and a batch size."""
    steps, share = IMAGES // batch, batch / 128
    last = dict.fromkeys(
        ("steps", "evaluate_every", "checkpoint__every", "log_every", "knn__every"), steps
    )
    values = {
        "batch_size": batch,
        "optimizer__warmup_steps": steps // 10,
        "knn__sets": ("digits:",),
    }
    values |= {
        "optimizer__learning_rate": 1e-3 * share,
        "dino__teacher_momentum": 1 - 0.01 * share,
    }
    return "dino_digits", last | values | LOSSES[loss] | {"knn__neighbours": (10,)}


def read(study):
    """Returns k-NN accuracies, and shares of used prototypes."""
    points = study.points("trained", "knn/digits/10", "prototypes_used")
    for point in points:
        point["neighbours"] = point.pop("knn/digits/10")
        point["prototypes"] = [used / PROTOTYPES for used in point.pop("prototypes_used")]
    return points


def table(figures):
    """Returns two tables with a line for each loss and a column for each batch size."""
    return "\n\n".join(
        pivot(figures, "loss", "batch", figure=name) for name in ("neighbours", "prototypes")
    )


EXPERIMENT = Experiment(
    claim="Each of DINO's losses bears small batches, where rate and momentum follow them.",
    stages=(grid("trained", {"loss": tuple(LOSSES), "batch": BATCHES}, trained),),
    read=read,
    table=table,
    minutes=25,
)
