"""Accuracy by pre-training set: python -m vit_jax.experiment table5 --out=DIR

At laptop scale the runs of figure 3: sets of 1,000 to 1,000,000 images stand for ImageNet, ImageNet-21k and
JFT-300M, and the alphabets for the data sets.
"""

from vit_jax.ledger.laptop import DOWNSTREAM
from vit_jax.ledger.stages import transfer
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing

SETS = {"ImageNet": "i1k", "ImageNet-21k": "i21k", "JFT-300M": "jft"}
MODELS = {"ViT-B/16": "b16", "ViT-B/32": "b32", "ViT-L/16": "l16", "ViT-L/32": "l32", "ViT-H/14": "h14"}
TASKS = {
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
    "ImageNet": "imagenet2012",
    "Flowers": "oxford_flowers102",
    "Pets": "oxford_iiit_pet",
}
COLUMNS = {
    f"{model}, {name}": (f"vit_{short}_{suffix}",)
    for name, suffix in SETS.items()
    for model, short in MODELS.items()
    if (name, model) != ("ImageNet", "ViT-H/14")
}


def read(study):
    """Fine-tuned and few-shot accuracies of each pre-training run, by its model and number of images."""
    shots = {f"fewshot/{name}/10": f"{name}, 10-shot" for name in DOWNSTREAM}
    tuned = {(p["model"], p["images"]): p["accuracy"] for p in study.points("finetuned", "accuracy")}
    points = study.points("pretrained", "accuracy", *shots)
    return [
        {"model": point["model"], "images": point["images"], "glyphs": point["accuracy"]}
        | {"cyrillic, fine-tuned": tuned.get((point["model"], point["images"]), [])}
        | {name: point[key] for key, name in shots.items()}
        for point in points
    ]


EXPERIMENT = Experiment(
    claim="The larger the pre-training set, the more a larger Transformer gains from it.",
    place="Table 5",
    runs_of="figure3",
    read=read,
    table=lambda figures: listing(
        figures,
        ("model", "images"),
        ("glyphs", "cyrillic, fine-tuned", *(f"{n}, 10-shot" for n in DOWNSTREAM)),
    ),
    paper=transfer(COLUMNS, TASKS, "table5"),
)
