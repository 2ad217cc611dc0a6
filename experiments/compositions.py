"""Captions of unseen combinations: vit-jax experiment compositions --out=DIR.

A small ViT and a text tower are trained on 100,000 images of 16 pixels with one coloured digit and
captions such as "a red 7 turned left". One fifth of the pairs of a digit and a colour are held
out: no training image shows them. The losses are SigLIP's and CLIP's. In locked-image tuning
(2111.07991) only the text tower is trained, with SigLIP's loss; the frozen image tower is from a
run of DINO. Zero-shot accuracy is measured on images of the held-out combinations, among the names
of all 180 combinations (chance is 0.6 %), and recall on images of the other 144 combinations
(chance is 0.7 %). All test images contain digits of other writers.
"""

from vit_jax.ledger.laptop import config_name
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing, means, ranking
from vit_jax.ledger.unlabelled import DINO, objective_values

MODEL, COLLECTION, SEEDS = "ViT-64x4/4", "digits", (0, 1, 2)
STEPS, DINO_STEPS = 1500, 600
LOSSES = {"SigLIP": "sigmoid", "CLIP": "softmax"}
STARTS = (*LOSSES, "images of DINO")
ZERO_SHOT = "zero_shot/digits/top-1"
RECALL = ("recall@1_image_to_text", "recall@1_text_to_image", "recall@5_text_to_image")


def images(study, seed):
    """Returns config and overrides of a run of DINO."""
    values = objective_values("dino", **(DINO | {"local_size": 8}))
    return config_name(MODEL, COLLECTION, steps=DINO_STEPS, source="coloured"), values


def pairs(study, start, seed):
    """Returns config and overrides of a run on captions; None if its image tower is missing."""
    loss = LOSSES.get(start, "sigmoid")
    config = config_name(MODEL, COLLECTION, steps=STEPS, source="coloured")
    values = {
        "contrastive__text_length": 24,
        "data__test_split": "dev[:2000]",
        "evaluate__suites": ("zero_shot",),
        "evaluate__options": ("set=coloured:digits@train,test[:2000]", "templates=a {}"),
    }
    if start in LOSSES:
        return f"{config},captions={loss}", values
    checkpoint = study.workdir("images", seed=seed)
    values |= {"finetune__checkpoint": checkpoint, "finetune__train": "head"}
    # The embeddings of the text tower are as wide as the image features, without a projection.
    values |= {"contrastive__embedding_dim": None, "model__head_std": None}
    return checkpoint and (f"{config},captions={loss}", values)


EXPERIMENT = Experiment(
    claim="Captions teach the parts of a combination, so that unseen combinations are recognized.",
    stages=(
        grid("images", {}, images, SEEDS),
        grid("pairs", {"start": STARTS}, pairs, SEEDS),
    ),
    read=lambda study: study.points("pairs", ZERO_SHOT, *RECALL),
    table=lambda figures: listing(figures, ("start",), (ZERO_SHOT, *RECALL)),
    finding=lambda figures: f"{ranking(means(figures, 'start', figure=ZERO_SHOT))} zero-shot.",
    minutes=45,
)
