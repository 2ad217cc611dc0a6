"""AugReg's ViTs on ImageNet-21k, "How to train your ViT?" (2106.10270).

The augmentation level is none for Ti/16 and S/32, light1 for S/16, light2 for B/32 and B/16, and
medium2 for L/16. --config.epochs=30 is the paper's short run. The paper also trains all
combinations of: any level (--config.augment.level=LEVEL); --config.optimizer.weight_decay=0.1 or
0.03; --config.model.dropout=0.1 together with --config.model.stochastic_depth=0.1, or no dropout
and no stochastic depth.

python -m vit_jax.main --config=configs/augreg_i21k.py:model=ViT-B/16 --workdir=DIR
"""

from vit_jax.config import choose, named_values
from vit_jax.errors import UserError, nearest
from vit_jax.recipes import pretraining

# AugReg's level for each model on ImageNet-21k (big_vision's configs, from the paper's figure 4).
LEVELS = {
    "ViT-Ti/16": "none",
    "ViT-S/32": "none",
    "ViT-S/16": "light1",
    "ViT-B/32": "light2",
    "ViT-B/16": "light2",
    "ViT-L/16": "medium2",
}


def get_config(argument=None):
    values, argument = named_values(argument, model="ViT-B/16")
    model = values["model"]
    if model not in LEVELS:
        raise UserError(
            f"AugReg's authors name no level for {model!r} on ImageNet-21k; "
            f"{nearest(model, LEVELS)}"
        )
    config = pretraining(model)  # Batch 4096, Adam, 10,000 steps of warm-up, clipping at 1.
    config.augment.level = LEVELS[model]
    # Values common to all AugReg runs (section 3).
    config.epochs = 300.0
    config.optimizer.learning_rate, config.optimizer.weight_decay = 1e-3, 0.1
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    config.model.dropout, config.model.stochastic_depth, config.model.pre_logits = 0.0, 0.0, False
    config.model.head_bias = -10.0
    # The published heads have 21,843 classes.
    config.data.path, config.data.num_classes = "imagenet21k", 21_843
    # The splits of big_vision's vit_i21k.
    config.data.train_split, config.data.dev_split = "train[51200:]", "train[25600:51200]"
    config.data.test_split = "train[:25600]"
    return choose(config, argument)
