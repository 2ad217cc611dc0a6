"""Masked patch prediction compared with supervised: vit-jax experiment masked_patch --out=DIR.

The small ViT is pre-trained by masked patch prediction on 20,000 images of `digits` without their
labels. The runs differ in one property: the target (the paper's three), the share of corrupted
patches (50 % or 15 %), or the number of steps (all or a quarter). Then each model is fine-tuned on
2,000 images with labels. Baselines are fine-tuning from random parameters, and pre-training on the
labels of all images. There are three seeds of pre-training, each with a fine-tuning run.
"""

from vit_jax import published
from vit_jax.ledger.paper_scale import TASKS
from vit_jax.ledger.stages import transfer
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import gains, listing, means, ranking
from vit_jax.ledger.unlabelled import few_labels

STEPS = 3000


def masked(target="color", **more):
    """Returns the overrides of a pre-training run with this target."""
    return {"objective__name": "masked_patch", "masked_patch__target": target} | more


STARTS = {
    "random parameters": None,
    "mean colour": masked(),
    "4 x 4 colours": masked("cells"),
    "pixels": masked("pixels"),
    "mean colour, 15 % corrupted": masked(masked_patch__mask_ratio=0.15),
    "mean colour, a quarter of the steps": masked(steps=STEPS // 4),
    "all labels": {},
}
PAPER = {
    "ViT-B/16, JFT-300M without labels": ("masked_patch_b16",),
    "ViT-B/16, ImageNet": ("vit_b16_i1k",),
    "ViT-B/16, JFT-300M": ("vit_b16_jft",),
}


def compared(figures):
    """Returns pairs of gains over random parameters: the paper's on ImageNet, and ours."""
    printed = published.table("section4_6").rows["ImageNet"]
    starts = ("mean colour", "random parameters", "all labels")
    return gains(
        dict(zip(starts, printed, strict=True)), means(figures, "start"), "random parameters"
    )


EXPERIMENT = Experiment(
    claim=(
        "Masked patch prediction helps, if less than labels; its targets, share and steps matter "
        "little."
    ),
    place="Section 4.6",
    stages=few_labels(STARTS, STEPS, tuning_steps=500),
    read=lambda study: study.points("finetuned", "accuracy"),
    table=lambda figures: listing(figures, ("start", "optimizer__learning_rate")),
    finding=lambda figures: f"{ranking(means(figures, 'start'))}.",
    compared=compared,
    paper=transfer(PAPER, {"ImageNet": TASKS["ImageNet"]}, "section4_6"),
    minutes=38,
)
