"""Axial attention compared with full attention: python -m vit_jax.experiment figure13 --out=DIR.

An Axial-ViT replaces each layer of a ViT by two layers: in the first, patches attend to patches in
the same row, in the second to patches in the same column (appendix D.6). So it has twice the
parameters. Axial-ViTs and ViTs of two sizes are trained on 100,000 images of `letters`, with two
seeds each. The plots show accuracy over the compute, and over the seconds of training. The
experiment does not include AxialResNet50.
"""

from dataclasses import replace

from vit_jax.ledger.charts import lines
from vit_jax.ledger.laptop import config_name
from vit_jax.ledger.paper_scale import FIVE_SHOT, FIVE_SHOT_FIGURE
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing, means, ranking

SIZES, STEPS = ("ViT-32x4/4", "ViT-64x4/4"), 500
PAPER = {"ViT-B/32": "vit_b32_jft", "ViT-B/16": "vit_b16_jft"}
KINDS = {"full": "", "axial": "Axial-"}


def pretrained(study, size, attention, seed):
    """Returns config and overrides of a training run.

    At the paper's scale it is on JFT-300M, with the learning rate of the ViT.
    """
    if size in PAPER:
        return PAPER[size], FIVE_SHOT | {"model__name": KINDS[attention] + size}
    return config_name(KINDS[attention] + size, steps=STEPS, size=32), {}


def read(study):
    """Returns accuracy, compute and time of each run.

    At the paper's scale the accuracy is few-shot on ImageNet.
    """
    figure = FIVE_SHOT_FIGURE if study.scale == "paper" else "accuracy"
    points = study.points("pretrained", figure, "exaflops", "seconds")
    return [{"accuracy": point[figure]} | point for point in points]


def draw(study, figures):
    """Draws accuracy over compute, and over time."""
    axes = {"figure13": "exaflops", "time": "seconds"}
    return {name: lines(figures, x, by=["attention"]) for name, x in axes.items()}


def finding(figures):
    """Returns a sentence with the models in the order of their accuracy, and their times."""
    seconds = means(figures, "size", "attention", figure="seconds")  # `means` multiplies by 100.
    times = ", ".join(f"{name} {value / 100:.0f} s" for name, value in seconds.items())
    return f"By accuracy: {ranking(means(figures, 'size', 'attention'))}. Time: {times}."


LAPTOP = Experiment(
    claim="Axial-ViTs are more accurate than ViTs of their size, at a higher cost.",
    place="Figure 13",
    stages=(grid("pretrained", {"size": SIZES, "attention": tuple(KINDS)}, pretrained, (0, 1)),),
    read=read,
    table=lambda figures: listing(figures, ("size", "attention", "exaflops", "seconds")),
    draw=draw,
    finding=finding,
    minutes=16,
)
AT_SCALE = grid("pretrained", {"size": tuple(PAPER), "attention": tuple(KINDS)}, pretrained)
EXPERIMENT = replace(LAPTOP, paper=replace(LAPTOP, stages=(AT_SCALE,)))
