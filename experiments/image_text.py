"""Images and captions from scratch and with locked images: vit-jax experiment image_text --out=DIR.

A small ViT and a text tower are trained on 100,000 centred letters of 16 pixels with the captions
"a large A", "a large B" and so on. They are trained with SigLIP's loss, and with CLIP's loss. In
locked-image tuning (2111.07991) only the text tower is trained, with SigLIP's loss; the frozen
image tower is from a run of DINO or of a classifier. The test images have other fonts. Zero-shot
accuracy is the share of test images whose own caption is the most similar of the 48 captions;
chance is 2.1 %.
"""

from vit_jax.ledger.laptop import config_name
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing, means, ranking
from vit_jax.ledger.unlabelled import DINO, objective_values

MODEL, COLLECTION, STEPS, SEEDS = "ViT-64x4/4", "letters", 600, (0, 1, 2)
IMAGES = {
    "DINO": objective_values("dino", **(DINO | {"local_size": 8})),
    "labels": {},
}
LOSSES = {"SigLIP": "sigmoid", "CLIP": "softmax"}
STARTS = (*LOSSES, *(f"images of {objective}" for objective in IMAGES))
ZERO_SHOT, RETRIEVAL = "recall@1_image_to_text", "recall@1_text_to_image"


def images(study, objective, seed):
    """Returns config and overrides of a run that trains only an image tower, without captions."""
    return config_name(MODEL, COLLECTION, steps=STEPS), IMAGES[objective]


def pairs(study, start, seed):
    """Returns config and overrides of a run on captions; None if its image tower is missing."""
    loss = LOSSES.get(start, "sigmoid")
    config = f"{config_name(MODEL, COLLECTION, steps=STEPS)},captions={loss}"
    values = {"contrastive__text_length": 16}
    if start in LOSSES:
        return config, values
    objective = start.removeprefix("images of ")
    checkpoint = study.workdir("images", objective=objective, seed=seed)
    values |= {"finetune__checkpoint": checkpoint, "finetune__train": "head"}
    # The embeddings of the text tower are as wide as the image features, without a projection.
    values |= {"contrastive__embedding_dim": None, "model__head_std": None}
    return checkpoint and (config, values)


EXPERIMENT = Experiment(
    claim="Captions alone teach a model to classify images by names.",
    stages=(
        grid("images", {"objective": tuple(IMAGES)}, images, SEEDS),
        grid("pairs", {"start": STARTS}, pairs, SEEDS),
    ),
    read=lambda study: study.points("pairs", ZERO_SHOT, RETRIEVAL),
    table=lambda figures: listing(figures, ("start",), (ZERO_SHOT, RETRIEVAL)),
    finding=lambda figures: f"{ranking(means(figures, 'start', figure=ZERO_SHOT))} zero-shot.",
    minutes=45,
)
