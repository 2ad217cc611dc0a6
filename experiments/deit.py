"""A small ViT with and without a teacher, as DeiT: python -m vit_jax.experiment deit --out=DIR.

Two teachers, a ConvNet and a larger ViT, are trained on 10,000 images of `letters` with labels.
Then the small ViT (the student) is trained on the same images for the same number of steps. It is
trained without a teacher, only on labels; and with each teacher, on labels and on the teacher's
predicted classes, with a distillation token. The student has three seeds, each teacher one. All
have the same learning rate; the only augmentation is random crops. In DeiT's table 2, DeiT-B
reaches 81.8 % without a teacher, 81.9 % with another DeiT-B as the teacher, and 82.7 % with a
ConvNet of 80.0 %.
"""

from vit_jax.ledger.laptop import config_name
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing, means, ranking

MODEL, IMAGES, STEPS = "ViT-32x4/4", 10_000, 1200
NONE, TEACHERS = "none", ("ViT-64x4/4", "BiT-R14x1/8")


def teaching(study, model, seed):
    """Returns config and overrides of a teacher's training run."""
    return config_name(model, images=IMAGES, steps=STEPS), {}


def taught(study, teacher, seed):
    """Returns config and overrides of a student's training run; None if its teacher is missing."""
    values = {}
    if teacher != NONE:
        folder = study.workdir("teaching", model=teacher)
        if folder is None:
            return None
        values = {"model__distillation": "heads", "objective__name": "distillation"}
        values |= {"distillation__kind": "hard", "objective__teacher": folder}
    return config_name(MODEL, images=IMAGES, steps=STEPS), values


def read(study):
    """Returns accuracies of students, by teacher, and accuracies of teachers."""
    theirs = {point["model"]: point["accuracy"] for point in study.points("teaching", "accuracy")}
    return [
        point | {"the teacher's accuracy": theirs.get(point["teacher"], [])}
        for point in study.points("taught", "accuracy")
    ]


EXPERIMENT = Experiment(
    claim=(
        "A small ViT learns more from labels and a ConvNet's choices than from labels and "
        "another ViT's."
    ),
    stages=(
        grid("teaching", {"model": TEACHERS}, teaching),
        grid("taught", {"teacher": (NONE, *TEACHERS)}, taught, (0, 1, 2)),
    ),
    read=read,
    table=lambda figures: listing(figures, ("teacher",), ("accuracy", "the teacher's accuracy")),
    finding=lambda figures: (
        f"{ranking(means(figures, 'teacher'))} of the test images, by the teacher."
    ),
    minutes=25,
)
