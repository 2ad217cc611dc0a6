"""Small models on generated images of 32 pixels, for experiments at laptop scale.

    python -m vit_jax.main --config=configs/composed.py:model=BiT-R14x1/4,images=10000 --workdir=DIR

`source` is `scattered`, `centred` or `coloured`, and `collection` the kind of objects, such as
`letters`. `images` is the number of training images; they are the first ones of the training
split. The optimizer is Adam with weight decay as in the paper, with a cosine schedule to 0. The
learning rate of each family of models was chosen on validation images (see the ledger).

`captions=sigmoid` or `captions=softmax` trains on captions of the images instead of labels, with
the loss of SigLIP or CLIP. The text tower has two layers and reads bytes.
"""

from vit_jax.config import base_config, choose, named_values


def get_config(argument=None):
    given = dict(model="ViT-64x4/4", source="scattered", collection="glyphs")
    given |= dict(images="100000", steps="2000", size="32", captions="")
    values, argument = named_values(argument, **given)
    steps = int(values["steps"])
    config = base_config()
    config.model.name = values["model"]
    if values["model"].startswith("BiT"):
        config.model.resnet_stem = "small"  # Other models have small patches by their names.
    config.batch_size, config.steps = 128, steps
    config.data.source, config.data.path = values["source"], values["collection"]
    config.data.train_split, config.data.test_split = f"train[:{values['images']}]", "test[:5000]"
    config.data.image_size = config.data.test_resize = int(values["size"])
    # Characters must not be mirrored or distorted, and the largest object must stay in the image.
    config.data.crop, config.data.flip = "random_resized", False
    config.data.crop_area, config.data.crop_aspect = (0.7, 1.0), (0.8, 1.25)
    config.optimizer.learning_rate, config.optimizer.weight_decay = 2e-3, 0.05
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    config.optimizer.warmup_steps, config.optimizer.clip_norm = max(1, steps // 10), 1.0
    config.log_every, config.evaluate_every, config.checkpoint.every = 100, steps, steps
    if values["captions"]:
        config.objective.name, config.contrastive.loss = "contrastive", values["captions"]
        config.contrastive.update(dict(text_dim=64, text_depth=2, text_heads=4, text_length=48))
        config.contrastive.embedding_dim, config.model.head_std = 64, 0.1
        if values["captions"] == "sigmoid":
            config.contrastive.initial_bias = -4.0
    return choose(config, argument)
