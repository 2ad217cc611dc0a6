"""The methods that followed the paper, in one table: python -m vit_jax.experiment followups --out=DIR

The figures that the methods' papers print, with how each was scored; and where there is an objective here,
ours at laptop scale: the small ViT pre-trained on 20,000 images of `digits`, then fine-tuned on 2,000 of them
with labels. So are models of other families, on labels alone, as `supervised` is. EVA's teacher is the run of
DINO, DeiT's that of ConvNeXt; DeiT sees all labels in pre-training. A later method is a line of `METHODS`.
Pre-training has one seed, fine-tuning three.
"""

from vit_jax import published
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import markdown_table, means, ranking, spread
from vit_jax.ledger.unlabelled import OTHERS, PATCHES, few_labels

DINO = {"name": "dino", "head_hidden": 256, "prototypes": 256, "teacher_momentum": 0.99}
# As `published/tables/followups.json` calls them; the values of its objective here,
# none of a classification; None is no pre-training.
METHODS = {
    "random parameters": None,
    "supervised": {},
    "masked patches": {"name": "masked_patch"},
    "MAE": {"name": "mae", "decoder_dim": 32, "decoder_depth": 2, "decoder_heads": 4},
    "DINO": DINO,
    "DINOv2": DINO | PATCHES,
    "EVA": {"name": "eva", "teacher": "DINO"},
    "DeiT": {"name": "distillation", "distillation": "hard", "teacher": "ConvNeXt"},
}
STARTS = {
    method: values and {f"objective__{key}": value for key, value in values.items()}
    for method, values in METHODS.items()
}
STARTS["DeiT"] |= {"model__distillation": "token"}  # With one head, which fine-tuning knows.


def table(figures):
    """A line for each published figure, then one for each method that ran here and has none."""
    ours, printed = (
        {point["start"]: spread(point["accuracy"]) for point in figures},
        published.table("followups"),
    )
    lines = [
        [head[key] for key in ("method", "model", "pretraining", "how")]
        + [figure, head["source"], ours.pop(head["method"], "")]
        for head, figure in zip(printed.columns, printed.rows["ImageNet"], strict=True)
    ]
    lines += [[method, "", "", "", "", "", accuracy] for method, accuracy in ours.items()]
    heads = ("method", "model", "pre-training", "how", "ImageNet, %", "source")
    return markdown_table([*heads, "ours, a tenth of `digits`' labels, %"], lines)


EXPERIMENT = Experiment(
    claim="Later methods need less labelled data than the Vision Transformer did.",
    stages=few_labels(STARTS | OTHERS, steps=4000, tuning_steps=600),
    read=lambda study: study.points("finetuned", "accuracy"),
    table=table,
    finding=lambda figures: f"Here, with a tenth of the labels: {ranking(means(figures, 'start'))}.",
    minutes=38,
)
