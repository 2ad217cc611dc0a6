"""ViTs on ImageNet with augmentation and regularisation as in "How to train your ViT?" (2106.10270).

Ti/16 takes light1, S/32 medium1, all others medium2.
The paper's grid: any --config.augment.level=LEVEL, --config.optimizer.weight_decay=0.1 or 0.03, and
--config.model.dropout=0.1 with --config.model.stochastic_depth=0.1, or neither.

python -m vit_jax.main --config=configs/augreg_i1k.py:model=ViT-B/16 --workdir=DIR
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import augreg_imagenet


def get_config(argument=None):
    values, argument = named_values(argument, model="ViT-B/16")
    return choose(augreg_imagenet(values["model"]), argument)
