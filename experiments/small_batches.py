"""The smallest usable batch of each loss: python -m vit_jax.experiment small_batches --out=DIR.

A small ViT is trained on scikit-learn's digits without labels, with four variants of DINO's loss:
centring by the running mean, by Sinkhorn-Knopp, by Sinkhorn-Knopp together with KoLeo, and no
centring. Batch sizes are 2 to 128, and each run uses the same total number of images. The learning
rate and (1 - the teacher's momentum) are proportional to the batch size. The results are the
accuracy of 10 nearest neighbours among the training images, and the share of prototypes in use.
Each run has one seed.
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
    """Returns config and overrides of the run with a variant of the loss and a batch size."""
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
    """Returns the k-NN accuracy of each run, and the share of prototypes in use."""
    points = study.points("trained", "knn/digits/10", "prototypes_used")
    for point in points:
        point["neighbours"] = point.pop("knn/digits/10")
        point["prototypes"] = [used / PROTOTYPES for used in point.pop("prototypes_used")]
    return points


def table(figures):
    """Returns two tables, each with a line for each loss and a column for each batch size."""
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
