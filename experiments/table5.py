"""Accuracy by pre-training set: python -m vit_jax.experiment table5 --out=DIR.

At laptop scale it uses the runs of figure 3. Pre-training on 1,000, 10,000 and 100,000 images takes
the place of ImageNet, ImageNet-21k and JFT-300M, and alphabets take the place of the data sets for
fine-tuning.
"""

import statistics

from vit_jax.ledger.laptop import DOWNSTREAM, MODELS
from vit_jax.ledger.paper_scale import BY_SET, TASKS
from vit_jax.ledger.stages import transfer
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing

FIGURES = ("letters", "cyrillic, fine-tuned", *(f"{name}, 10-shot" for name in DOWNSTREAM))


def read(study):
    """Returns fine-tuned and few-shot accuracy of each model and number of pre-training images."""
    shots = {f"fewshot/{name}/10": f"{name}, 10-shot" for name in DOWNSTREAM}
    tuned = {
        (p["model"], p["images"]): p["accuracy"] for p in study.points("finetuned", "accuracy")
    }
    points = study.points("pretrained", "accuracy", *shots)
    return [
        {"model": point["model"], "images": point["images"], "letters": point["accuracy"]}
        | {"cyrillic, fine-tuned": tuned.get((point["model"], point["images"]), [])}
        | {name: point[key] for key, name in shots.items()}
        for point in points
    ]


def finding(figures):
    """Returns a sentence: the lead of the larger ViT over the smaller one, by number of images."""
    small, large, *_ = MODELS["ViT"]
    sentences = []
    for name in FIGURES[:2]:
        found = {
            (p["model"], p["images"]): 100 * statistics.mean(p[name]) for p in figures if p[name]
        }
        leads = [
            f"{found[large, images] - found[small, images]:+.1f} after {images:,} images"
            for model, images in found
            if model == large and (small, images) in found
        ]
        sentences += [f"{name}: {', '.join(leads)}"] if leads else []
    return f"Points of {large} over {small}: {'; '.join(sentences)}." if sentences else ""


EXPERIMENT = Experiment(
    claim="The larger the pre-training set, the more a larger Transformer gains from it.",
    place="Table 5",
    runs_of="figure3",
    read=read,
    table=lambda figures: listing(figures, ("model", "images"), FIGURES),
    finding=finding,
    paper=transfer(BY_SET, TASKS, "table5"),
)
