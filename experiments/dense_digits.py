"""Segmentation and detection of composed digits: vit-jax experiment dense_digits --out=DIR.

First the backbones are pre-trained on 20,000 centred digits of 64 pixels: a small ViT and a small
ConvNeXt, each with labels and by DINO without labels. Then heads are trained on them. For
segmentation these are a linear layer on frozen features of the ViT, EoMT on the ViT, and UPerNet on
the ConvNeXt; they are trained on 2,000 centred digits with masks. A detector is trained on the
ConvNeXt, with images of one to five scattered digits. Test images are composed of other scans.
"""

from typing import Any

from vit_jax.ledger.laptop import config_name
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment, Study
from vit_jax.ledger.tables import listing, means, ranking
from vit_jax.ledger.unlabelled import DINO, objective_values

IMAGES, SIZE, VIT, CONVNEXT = 20_000, 64, "ViT-64x4/8", "ConvNeXt-T"
# The ConvNeXt has four stages, because the heads need feature maps at four resolutions.
WIDTHS = dict(model__blocks=(1, 1, 2, 1), model__widths=(24, 48, 96, 192))
SEEDS, RANDOM = (0, 1, 2), "random parameters"
STARTS = {"labels": {}, "DINO": objective_values("dino", **DINO) | {"batch_size": 64}}
STEPS = {"labels": 400, "DINO": 400}
EOMT = dict(queries=16, query_layers=2, masked_until=(0.0, 0.4), unmasked_from=(0.2, 0.8))
# For each head: config, backbone, steps, learning rate and options. The heads are small.
HEADS = {
    "linear": ("segment:head=linear", VIT, 400, 1e-2, {}),
    "eomt": ("segment:head=eomt", VIT, 400, 1e-3, EOMT | {"points": 512}),
    "upernet": ("segment:head=upernet", CONVNEXT, 300, 1e-3, dict(dim=64, auxiliary_dim=32)),
    "boxes": ("detect:size=64", CONVNEXT, 500, 1e-3, dict(dim=96, depth=2, queries=24, most=8)),
}
RESULTS = {"segmentation": "miou", "detection": "ap50"}
DATA = {
    "segmentation": dict(data__source="centred", data__train_split="train[:2000]"),
    "detection": dict(data__source="scattered", data__train_split=f"train[:{IMAGES}]"),
}
COMMON = dict(
    data__path="digits", data__test_split="test[:500]", data__image_size=SIZE,
    data__test_resize=SIZE, data__crop="none", data__crop_scale=(0.5, 2.0),
    data__cat_max_ratio=1.0, data__flip=False, model__dtype="float32",
    model__stochastic_depth=0.0, batch_size=32, optimizer__layer_decay=1.0,
    optimizer__clip_norm=1.0, finetune__frozen_steps=0, finetune__warmup_steps=0,
)  # fmt: skip


def pretrained(study, model, start, seed):
    """Returns config and overrides of a pre-training run on centred digits."""
    values = STARTS[start] | (WIDTHS if model == CONVNEXT else {})
    return config_name(model, "digits", IMAGES, STEPS[start], SIZE), values


def with_head(study, head, start, seed):
    """Returns config and overrides of a head's training run; None if its backbone is missing."""
    config, model, steps, rate, options = HEADS[head]
    task = "detection" if head == "boxes" else "segmentation"
    values = COMMON | DATA[task] | {f"{task}__{key}": value for key, value in options.items()}
    values |= dict(optimizer__learning_rate=rate, evaluate_every=steps, checkpoint__every=steps)
    checkpoint = None
    if start == RANDOM:
        values |= {"model__name": model} | (WIDTHS if model == CONVNEXT else {})
    else:
        checkpoint = study.workdir("pretrained", model=model, start=start, seed=seed)
    values["finetune__checkpoint"] = checkpoint
    missing = checkpoint is None and start != RANDOM
    return None if missing else (f"{config},backbone={model},steps={steps}", values)


def draw(study: Study, figures: Any) -> dict[str, Any]:
    """Draws three test images with the classes that each run of the first seed predicts."""
    from vit_jax.data.sources import open_source
    from vit_jax.ledger.segmented import draw_predictions

    source = open_source("centred", "test", path="digits", image_size=SIZE)
    runs = {
        f"{trial.factors['head']}, {trial.factors['start']}": trial.job.workdir
        for trial in study.finished("segmentation", seed=SEEDS[0])
    }
    return {"dense_digits": draw_predictions([source[i].image for i in (0, 1, 2)], runs)}


EXPERIMENT = Experiment(
    claim="Heads of dense prediction learn faster on features of other images.",
    stages=(
        grid("pretrained", {"model": (VIT, CONVNEXT), "start": tuple(STARTS)}, pretrained, SEEDS),
        grid("segmentation", {"head": [*HEADS][:3], "start": (RANDOM, *STARTS)}, with_head, SEEDS),
        grid("detection", {"head": ("boxes",), "start": (RANDOM, *STARTS)}, with_head, SEEDS),
    ),
    read=lambda study: {task: study.points(task, figure) for task, figure in RESULTS.items()},
    table=lambda figures: "\n\n".join(
        listing(figures[task], ("head", "start"), (figure,)) for task, figure in RESULTS.items()
    ),
    finding=lambda figures: "; ".join(
        ranking(means(figures[task], "head", "start", figure=figure))
        for task, figure in RESULTS.items()
    ),
    draw=draw,
    minutes=110,
)
