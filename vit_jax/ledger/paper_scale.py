"""The paper's scale: configs of its pre-training runs, and the data sets in its tables."""

import re
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vit_jax import published
from vit_jax.ledger.charts import lines
from vit_jax.ledger.laptop import family_of
from vit_jax.ledger.power_law import laws, laws_in_words
from vit_jax.ledger.stages import by_model, transfer
from vit_jax.ledger.study import Experiment, Study

SETS = {"ImageNet": "i1k", "ImageNet-21k": "i21k", "JFT-300M": "jft"}
MODELS = {
    "ViT-B/16": "b16",
    "ViT-B/32": "b32",
    "ViT-L/16": "l16",
    "ViT-L/32": "l32",
    "ViT-H/14": "h14",
}
# Maps rows of the paper's tables 2, 5, 6 and 7 to data sets for fine-tuning.
TASKS = {
    "ImageNet": "imagenet2012",
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
    "Pets": "oxford_iiit_pet",
    "Flowers": "oxford_flowers102",
}
# Maps columns of the paper's table 5 to pre-training configs. The table has no ViT-H/14 that is
# pre-trained on ImageNet.
BY_SET = {
    f"{model}, {name}": (f"vit_{short}_{suffix}",)
    for name, suffix in SETS.items()
    for model, short in MODELS.items()
    if (name, model) != ("ImageNet", "ViT-H/14")
}
# Maps columns of the paper's table 2 to pre-training configs. Table 9 has the same ViTs. BiT-L is
# trained with BiT's own recipe.
LARGEST = {
    name: BY_SET[name]
    for name in ("ViT-H/14, JFT-300M", "ViT-L/16, JFT-300M", "ViT-L/16, ImageNet-21k")
} | {"BiT-R152x4, JFT-300M": ("bit_r152x4_jft",)}
# Figure 3 shows ResNets as a shaded band. Its limits are the smallest and the largest BiT on each
# data set.
BAND = {
    f"BiT-{size}, {name}": (f"bit_{suffix}:model=BiT-{size}",)
    for name, suffix in SETS.items()
    for size in ("R50x1", "R152x4")
    if suffix != "jft"
}
BAND |= {f"BiT-{size}, JFT-300M": (f"bit_{size.lower()}_jft",) for size in ("R50x1", "R152x4")}
# Overrides for five-shot ImageNet evaluation of pre-training runs, for figures 4, 8, 9 and 13.
FIVE_SHOT = {
    "fewshot__sets": ("tfds:imagenet2012@train,validation",),
    "fewshot__shots": (5,),
    "fewshot__every": 25_000,
}
# Columns of table 6, which are also the models of figure 5. The config of a model has the model's
# name.
TABLE6 = published.table("table6")
SCALING = {
    name: (
        f"{re.sub('[-+]', '_', head['model'].lower()).replace('/', '')}_jft",
        {"epochs": float(head["epochs"])} | FIVE_SHOT,
    )
    for name, head in zip(TABLE6.by_model(), TABLE6.columns, strict=True)
}
# Models and numbers of JFT-300M images in figure 4. Runs on fewer images have as many steps as the
# run on all images.
JFT_IMAGES = 303_000_000
SUBSETS = (9_000_000, 30_000_000, 90_000_000, JFT_IMAGES)
ON_SUBSETS = {"ViT-b/32": ("vit_b32_jft", {"model__name": "ViT-b/32"})}
ON_SUBSETS |= {name: (f"vit_{MODELS[name]}_jft",) for name in ("ViT-B/32", "ViT-L/32", "ViT-L/16")}
ON_SUBSETS |= {f"BiT-{size}": (f"bit_{size.lower()}_jft",) for size in ("R50x1", "R152x2")}
FIVE_SHOT_FIGURE = "fewshot/imagenet2012/5"


def scaling(picture: str) -> Experiment:
    """Returns an experiment for table 6, with power laws of mean error over training compute."""
    transferred = transfer(SCALING, TASKS, "table6")

    def read(study: Study) -> dict[str, dict[str, float]]:
        rows = transferred.read(study)
        whole = [name for name in SCALING if all(name in row for row in rows.values())]
        means = {name: statistics.mean(row[name] for row in rows.values()) for name in whole}
        few_shot = by_model(study, "pretrained", FIVE_SHOT_FIGURE)
        compute = {
            point["model"]: point["exaflops"][0] for point in study.points("pretrained", "exaflops")
        }
        return rows | {"mean of these": means, "few-shot": few_shot, "exaFLOPs": compute}

    def points(rows: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
        return [
            {
                "family": family_of(name),
                "exaflops": [rows["exaFLOPs"][name]],
                "accuracy": [mean / 100],
            }
            for name, mean in rows["mean of these"].items()
        ]

    return replace(
        transferred,
        read=read,
        draw=lambda study, rows: {picture: lines(points(rows), "exaflops", by=["family"])},
        finding=lambda rows: laws_in_words(laws(points(rows), "exaflops", "accuracy", "family")),
    )
