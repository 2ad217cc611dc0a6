"""Results of the methods that followed the paper: python -m vit_jax.experiment followups --out=DIR.

The table lists results from the papers of DINO, MAE, BEiT and other methods, with the evaluation
that each paper used. If the method is implemented here, the table also has our result at laptop
scale: the small ViT (for FCMAE a ConvNeXt V2) is pre-trained on 20,000 images of `digits`, and then
fine-tuned on 2,000 of them with labels. The teacher of EVA and VQ-KD is the model of DINO's run,
and the teacher of DeiT is that of ConvNeXt's run. BEiT predicts codes of a dVAE, and BEiT v2 codes
of VQ-KD. Only `supervised`, DeiT, ConvNeXt and Swin are pre-trained with labels. To add a method,
add a line to `STARTS`. There are three seeds of pre-training; teachers and fine-tuning runs have
the same seeds.
"""

from vit_jax import published
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import markdown_table, means, ranking, spread
from vit_jax.ledger.unlabelled import (
    CONVNEXT_V2,
    OTHERS,
    PATCHES,
    PLAIN_VIEWS,
    TOKENISERS,
    few_labels,
    objective_values,
)

DINO = PLAIN_VIEWS | {"local_crops": 0, "head_hidden": 256, "prototypes": 256}
DINO |= {"teacher_momentum": 0.99}
# Overrides of each method's pre-training, by its name in `published/tables/followups.json`. With
# empty overrides pre-training is supervised.
STARTS = {
    "random parameters": None,
    "supervised": {},
    "masked patches": objective_values("masked_patch"),
    "MAE": objective_values("mae", decoder_dim=32, decoder_depth=2, decoder_heads=4),
    "DINO": objective_values("dino", **DINO),
    "DINOv2": objective_values("dino", **(DINO | PATCHES)),
    "BEiT": objective_values("beit", teacher="dVAE"),
    "BEiT v2": objective_values("beitv2", teacher="VQ-KD"),
    "EVA": objective_values("eva", teacher="DINO"),
    "FCMAE": objective_values("fcmae", decoder_dim=32),
    "DeiT": objective_values("distillation", teacher="ConvNeXt", kind="hard"),
}
STARTS["DeiT"] |= {"model__distillation": "token"}  # With one head, as fine-tuning requires.
STARTS |= OTHERS | TOKENISERS | {"FCMAE": STARTS["FCMAE"] | CONVNEXT_V2}
STARTS["random ConvNeXt V2"] = CONVNEXT_V2 | {"steps": 0}


def table(figures):
    """Returns a table: a line for each published result, then one for each other method here."""
    ours = {point["start"]: spread(point["accuracy"]) for point in figures}
    printed = published.table("followups")
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
    stages=few_labels(STARTS, 4000, tuning_steps=600, only_teach=[*TOKENISERS]),
    read=lambda study: study.points("finetuned", "accuracy"),
    table=table,
    finding=lambda figures: (
        f"Here, with a tenth of the labels: {ranking(means(figures, 'start'))}."
    ),
    minutes=112,
)
