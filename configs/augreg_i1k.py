"""ViTs on ImageNet with augmentation and regularization, "How to train your ViT?" (2106.10270).

The augmentation level is light1 for Ti/16, medium1 for S/32 and medium2 for all other models. The
paper also trains all combinations of: any level (--config.augment.level=LEVEL);
--config.optimizer.weight_decay=0.1 or 0.03; --config.model.dropout=0.1 together with
--config.model.stochastic_depth=0.1, or no dropout and no stochastic depth.

python -m vit_jax.main --config=configs/augreg_i1k.py:model=ViT-B/16 --workdir=DIR
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import pretraining


def get_config(argument=None):
    values, argument = named_values(argument, model="ViT-B/16")
    # Batch 4096, Adam, 10,000 steps of warm-up, clipping at 1.
    config = pretraining(values["model"])
    config.augment.level = {"ViT-Ti/16": "light1", "ViT-S/32": "medium1"}.get(
        values["model"], "medium2"
    )
    # Values common to all AugReg runs (section 3).
    config.epochs = 300.0
    config.optimizer.learning_rate, config.optimizer.weight_decay = 1e-3, 0.1
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    config.model.dropout, config.model.stochastic_depth, config.model.pre_logits = 0.0, 0.0, False
    config.model.head_bias = -6.9
    config.data.path = "imagenet2012"
    config.data.train_split, config.data.dev_split = "train[:99%]", "train[99%:]"
    config.data.test_split = "validation"
    return choose(config, argument)
