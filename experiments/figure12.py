"""Speed and memory of inference over image sizes: python -m vit_jax.experiment figure12 --out=DIR

Images a second by the clock here, in float32, and the memory of the compiled program, by the
functions of
`python -m vit_jax.benchmark inference`. At the paper's scale both are the TPU compiler's estimates
for a core of TPU v3 in bfloat16, not measured (pip install -e ".[plan]"; each program compiles for
minutes). What was measured is kept in the folder.
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
    """Images a second, and MB that an image more takes, by model and image size."""
    how, asked = (timed, HERE) if study.scale == "laptop" else (on_tpu, PAPER)
    return kept(study, how, asked["models"], asked["sizes"])


def table(figures):
    """A line for each model and image size."""
    lines = [
        [row["model"], row["size"], written(row["speed"]), written(row["memory"])]
        for row in figures
    ]
    return markdown_table(("model", "image size", "images/s", "MB an image more"), lines)


def draw(study, figures):
    """Speed and memory over image sizes."""
    labels = {"speed": "images/s", "memory": "MB an image more"}
    return {"figure12": panels(figures, "size", "image size, pixels", labels, "model")}


def finding(figures):
    """A ViT beside the ResNet of like compute, at the largest size."""
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
