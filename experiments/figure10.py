"""Position similarity by learning rate: python -m vit_jax.experiment figure10 --out=DIR.

The figure has a tile for each patch, which shows the cosine similarity of its position embedding to
those of all patches. The runs differ in learning rate, weight decay and number of epochs. At laptop
scale small ViTs learn scikit-learn's digits, and the longest run has twice the steps. The paper's
runs are ViT-L/16 on JFT-300M, for 7 and 14 epochs. The results are mean similarities: of
neighbouring patches, of patches in the same row or column, and of other patches.
"""

from vit_jax.inspection.figures import similarity_panels
from vit_jax.ledger.laptop import short_run
from vit_jax.ledger.looking import nearness, positions_of
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import by_name

STEPS = 400
# For each setting: factor of the number of steps, factor of the learning rate, and weight decay.
SETTINGS = {"rate x 1, decay 0.01": (1, 1, 0.01), "rate x 2, decay 0.1": (1, 2, 0.1)}
SETTINGS |= {"rate x 2, decay 0.1, epochs x 2": (2, 2, 0.1)}


def trained(study, setting, seed):
    """Returns config and overrides of the training run with a setting, at the study's scale."""
    longer, rate, decay = SETTINGS[setting]
    values = {"optimizer__weight_decay": decay, "optimizer__learning_rate": 2e-4 * rate}
    if study.scale == "paper":
        return "vit_l16_jft", values | {"epochs": 7.0 * longer}
    small = {"model__name": "ViT-Ti/2", "optimizer__learning_rate": 1e-3 * rate}
    return short_run(STEPS * longer, **values | small)


def read(study):
    """Returns mean similarities and the accuracy of each setting."""
    return {
        trial.factors["setting"]: nearness(positions_of(trial.job.workdir))
        | {"accuracy": study.figure(trial, "accuracy")}
        for trial in study.finished("trained")
    }


def draw(study, figures):
    """Draws the similarities of each setting."""
    runs = {trial.factors["setting"]: trial.job.workdir for trial in study.finished("trained")}
    return {"figure10": similarity_panels({name: positions_of(run) for name, run in runs.items()})}


def finding(figures):
    """Returns a sentence: how much more similar neighbours are than other patches, by setting."""
    gaps = [
        f"{found['neighbours'] - found['others']:.2f} ({name})" for name, found in figures.items()
    ]
    return f"Neighbours are more alike than patches in other rows and columns by {', '.join(gaps)}."


SHARED = dict(
    claim="What position embeddings learn of the grid depends on rate, decay and epochs.",
    stages=(grid("trained", {"setting": tuple(SETTINGS)}, trained),),
    read=read,
    table=by_name,
    draw=draw,
    finding=finding,
)
EXPERIMENT = Experiment(**SHARED, place="Figure 10", paper=Experiment(**SHARED), minutes=5)
