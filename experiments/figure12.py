"""Speed and memory of inference by image size: python -m vit_jax.experiment figure12 --out=DIR.

At laptop scale it measures images/s on this machine, in float32, and the memory of the compiled
program, as `python -m vit_jax.benchmark inference` does. At the paper's scale speed and memory are
not measured, but estimated by the TPU compiler for a core of TPU v3 in bfloat16 (pip install -e
".[plan]"; each program takes minutes to compile). Results are cached in the folder.
"""

from vit_jax.ledger.charts import panels
from vit_jax.ledger.speed import kept, on_tpu, timed
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import markdown_table, written

HERE = {
    "models": ("ViT-Ti/16", "ViT-S/32", "ViT-S/16", "ViT-B/32", "ViT-B/16", "BiT-R50x1"),
    "sizes": (64, 128, 224),
}
PAPER = {
    "models": (
        "BiT-R50x1",
        "BiT-R152x4",
        "ViT-B/32",
        "ViT-B/16",
        "ViT-L/32",
        "ViT-L/16",
        "ViT-H/14",
    ),
    "sizes": (64, 128, 224, 384, 512),
}


def read(study):
    """Returns images/s, and the memory of each additional image in MB, by model and image size."""
    how, asked = (timed, HERE) if study.scale == "laptop" else (on_tpu, PAPER)
    return kept(study, how, asked["models"], asked["sizes"])


def table(figures):
    """Returns a table with a line for each model and image size."""
    lines = [
        [row["model"], row["size"], written(row["speed"]), written(row["memory"])]
        for row in figures
    ]
    return markdown_table(("model", "image size", "images/s", "MB an image more"), lines)


def draw(study, figures):
    """Draws speed and memory over image sizes."""
    labels = {"speed": "images/s", "memory": "MB an image more"}
    return {"figure12": panels(figures, "size", "image size, pixels", labels, "model")}


def finding(figures):
    """Returns a sentence that compares ViT-S/16 and BiT-R50x1 at the largest image size."""
    largest = max(row["size"] for row in figures)
    at = {row["model"]: row for row in figures if row["size"] == largest}
    ours, theirs = at.get("ViT-S/16"), at.get("BiT-R50x1")
    if not ours or not theirs:
        return ""
    return (
        f"At {largest} pixels ViT-S/16 does {ours['speed'] / theirs['speed']:.1f} times as many "
        f"images/s as BiT-R50x1, of like compute, with {ours['memory'] / theirs['memory']:.2f} of "
        "its memory an image."
    )


SHARED = dict(
    claim="ViTs are about as fast as ResNets of like compute, and need less memory.", read=read
)
SHARED |= dict(table=table, draw=draw, finding=finding)
EXPERIMENT = Experiment(**SHARED, place="Figure 12", paper=Experiment(**SHARED), minutes=3)
