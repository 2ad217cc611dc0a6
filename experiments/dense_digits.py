"""Segmentation and detection of scattered digits: vit-jax experiment dense_digits --out=DIR.

A small ViT and a small ConvNeXt are trained on 20,000 centred digits of 64 pixels, with labels or,
the ViT, by DINO. Then heads are trained on 20,000 images with one to five scattered digits: a
linear layer on the frozen features of the ViT, EoMT on the ViT, UPerNet and boxes on the ConvNeXt.
Baselines start from random parameters. The test images contain other scans of digits.
"""

from vit_jax.ledger.laptop import config_name
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing, means, ranking
from vit_jax.ledger.unlabelled import DINO, objective_values

SIZE, IMAGES, TEST_IMAGES = 64, 20_000, 500
VIT, CONVNEXT = "ViT-96x4/8", "ConvNeXt-T"
# Four stages, as many as the heads' pyramids have.
WIDTHS = {"model__blocks": (1, 1, 2, 1), "model__widths": (24, 48, 96, 192)}
PRETRAINING = {
    "labels": (400, {}),
    "DINO": (400, objective_values("dino", **DINO) | {"batch_size": 64}),
}
RANDOM = "random parameters"
# Model, steps and overrides of a head: its section's, and those of a small model on small images.
HEADS = {
    "linear": (VIT, 200, {"optimizer__learning_rate": 1e-2}),
    "eomt": (
        VIT,
        400,
        {
            "optimizer__learning_rate": 2e-3,
            "optimizer__clip_norm": 1.0,
            "segmentation__queries": 16,
            "segmentation__query_layers": 2,
            "segmentation__masked_until": (0.0, 0.4),
            "segmentation__unmasked_from": (0.2, 0.8),
            "segmentation__points": 512,
            "finetune__frozen_steps": 0,
            "finetune__warmup_steps": 0,
        },
    ),
    "upernet": (
        CONVNEXT,
        300,
        {
            "optimizer__learning_rate": 2e-3,
            "segmentation__dim": 64,
            "segmentation__auxiliary_dim": 32,
        },
    ),
    "detection": (
        CONVNEXT,
        500,
        {
            "optimizer__learning_rate": 1e-3,
            "optimizer__clip_norm": 1.0,
            "detection__dim": 96,
            "detection__depth": 2,
            "detection__queries": 24,
            "detection__most": 8,
        },
    ),
}
RESULTS = {"segmentation": "miou", "detection": "ap50"}
STARTS = (RANDOM, *PRETRAINING)


def of_model(model):
    """Returns the overrides of a model."""
    return WIDTHS if model == CONVNEXT else {}


def pretrained(study, model, start, seed):
    """Returns a run on centred digits; None for DINO with the ConvNeXt."""
    if (model, start) == (CONVNEXT, "DINO"):
        return None
    steps, values = PRETRAINING[start]
    return config_name(model, "digits", IMAGES, steps, SIZE), values | of_model(model)


def with_head(study, head, start, seed):
    """Returns a run of a head on scattered digits; None if its start is missing."""
    model, steps, values = HEADS[head]
    values = values | {
        "data__source": "scattered",
        "data__path": "digits",
        "data__train_split": f"train[:{IMAGES}]",
        "data__test_split": f"test[:{TEST_IMAGES}]",
        "data__image_size": SIZE,
        "data__test_resize": SIZE,
        "data__crop": "none",
        "data__flip": False,
        "batch_size": 32,
        "evaluate_every": steps,
        "checkpoint__every": steps,
        "model__dtype": "float32",
        "model__stochastic_depth": 0.0,
        "optimizer__layer_decay": 1.0,
        "optimizer__schedule": "cosine",
    }
    if start == RANDOM:
        values |= of_model(model) | {"model__name": model, "finetune__checkpoint": None}
    else:
        checkpoint = study.workdir("pretrained", model=model, start=start, seed=seed)
        if checkpoint is None:
            return None
        values["finetune__checkpoint"] = checkpoint
    file = "detect" if head == "detection" else "segment"
    own = "size=64" if head == "detection" else f"head={head}"
    return f"{file}:backbone={model},{own},steps={steps}", values


SEGMENTED = tuple(head for head in HEADS if head != "detection")
EXPERIMENT = Experiment(
    claim="Heads of dense prediction learn faster on features of other images.",
    stages=(
        grid("pretrained", {"model": (VIT, CONVNEXT), "start": tuple(PRETRAINING)}, pretrained),
        grid("segmentation", {"head": SEGMENTED, "start": STARTS}, with_head),
        grid("detection", {"head": ("detection",), "start": STARTS}, with_head),
    ),
    read=lambda study: {
        "segmentation": study.points("segmentation", "miou"),
        "detection": study.points("detection", "ap50"),
    },
    table=lambda figures: "\n\n".join(
        listing(figures[task], ("head", "start"), (figure,)) for task, figure in RESULTS.items()
    ),
    finding=lambda figures: "; ".join(
        ranking(means(figures[task], "head", "start", figure=figure))
        for task, figure in RESULTS.items()
    ),
    minutes=45,
)
