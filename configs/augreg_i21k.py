"""ViTs on ImageNet-21k with augmentation and regularisation as in "How to train your ViT?" (2106.10270).

Ti/16 and S/32 take none, S/16 light1, B/32 and B/16 light2, L/16 medium2.
--config.epochs=30 is the paper's short run.
The paper's grid: any --config.augment.level=LEVEL, --config.optimizer.weight_decay=0.1 or 0.03, and
--config.model.dropout=0.1 with --config.model.stochastic_depth=0.1, or neither.

python -m vit_jax.main --config=configs/augreg_i21k.py:model=ViT-B/16 --workdir=DIR
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import augreg_imagenet21k


def get_config(argument=None):
    values, argument = named_values(argument, model="ViT-B/16")
    return choose(augreg_imagenet21k(values["model"]), argument)
