"""Segmentation and detection of scattered digits: vit-jax experiment dense_digits --out=DIR.

A small ViT and a small ConvNeXt learn 20,000 centred digits of 64 pixels with labels, the ViT also
by DINO. Heads are then trained for few steps on images of one to five scattered digits: a linear
layer on the ViT's frozen features, EoMT on the ViT, UPerNet and boxes on the ConvNeXt.
"""

from vit_jax.ledger.laptop import config_name
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing, means, ranking
from vit_jax.ledger.unlabelled import DINO, objective_values

IMAGES, SIZE, VIT, CONVNEXT = 20_000, 64, "ViT-96x4/8", "ConvNeXt-T"
# Four stages, as many as the heads' pyramids have.
WIDTHS = dict(model__blocks=(1, 1, 2, 1), model__widths=(24, 48, 96, 192))
RANDOM = "random parameters"
STARTS = {"labels": {}, "DINO": objective_values("dino", **DINO) | {"batch_size": 64}}
EOMT = dict(queries=16, query_layers=2, masked_until=(0.0, 0.4), unmasked_from=(0.2, 0.8))
# Config, model, steps, learning rate and options of a head: those of a small model.
HEADS = {
    "linear": ("segment:head=linear", VIT, 200, 1e-2, {}),
    "eomt": ("segment:head=eomt", VIT, 400, 2e-3, EOMT | {"points": 512}),
    "upernet": ("segment:head=upernet", CONVNEXT, 300, 2e-3, dict(dim=64, auxiliary_dim=32)),
    "boxes": ("detect:size=64", CONVNEXT, 500, 1e-3, dict(dim=96, depth=2, queries=24, most=8)),
}
RESULTS = {"segmentation": "miou", "detection": "ap50"}
COMMON = dict(
    data__source="scattered", data__path="digits", data__test_split="test[:500]",
    data__train_split=f"train[:{IMAGES}]", data__image_size=SIZE, data__test_resize=SIZE,
    data__crop="none", data__crop_scale=(0.5, 2.0), data__cat_max_ratio=1.0, data__flip=False,
    model__dtype="float32",
    model__stochastic_depth=0.0, batch_size=32, optimizer__layer_decay=1.0,
    finetune__frozen_steps=0, finetune__warmup_steps=0,
)  # fmt: skip


def pretrained(study, model, start, seed):
    """Returns a run on centred digits; None for DINO with the ConvNeXt."""
    widths = WIDTHS if model == CONVNEXT else {}
    found = config_name(model, "digits", IMAGES, 400, SIZE), STARTS[start] | widths
    return None if (model, start) == (CONVNEXT, "DINO") else found


def with_head(study, head, start, seed):
    """Returns a run of a head on scattered digits; None if its start is missing."""
    config, model, steps, rate, options = HEADS[head]
    section = "detection" if head == "boxes" else "segmentation"
    values = COMMON | {f"{section}__{key}": value for key, value in options.items()}
    values |= dict(optimizer__learning_rate=rate, optimizer__clip_norm=1.0)
    values |= dict(evaluate_every=steps, checkpoint__every=steps)
    checkpoint = None
    if start == RANDOM:
        values |= {"model__name": model} | (WIDTHS if model == CONVNEXT else {})
    else:
        checkpoint = study.workdir("pretrained", model=model, start=start, seed=seed)
    values["finetune__checkpoint"] = checkpoint
    missing = checkpoint is None and start != RANDOM
    return None if missing else (f"{config},backbone={model},steps={steps}", values)


EXPERIMENT = Experiment(
    claim="Heads of dense prediction learn faster on features of other images.",
    stages=(
        grid("pretrained", {"model": (VIT, CONVNEXT), "start": tuple(STARTS)}, pretrained),
        grid("detection", {"head": ("boxes",), "start": (RANDOM, *STARTS)}, with_head),
        grid("segmentation", {"head": [*HEADS][:3], "start": (RANDOM, *STARTS)}, with_head),
    ),
    read=lambda study: {task: study.points(task, figure) for task, figure in RESULTS.items()},
    table=lambda figures: "\n\n".join(
        listing(figures[task], ("head", "start"), (figure,)) for task, figure in RESULTS.items()
    ),
    finding=lambda figures: "; ".join(
        ranking(means(figures[task], "head", "start", figure=figure))
        for task, figure in RESULTS.items()
    ),
    minutes=40,
)
