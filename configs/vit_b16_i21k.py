"""ViT-B/16 on ImageNet-21k: the paper's pre-training (table 3).

The authors report 47.88 % precision at 1 on held-out images (vision_transformer, issue 62).

python -m vit_jax.main --config=configs/vit_b16_i21k.py --workdir=DIR
"""

from vit_jax.config import choose
from vit_jax.recipes import imagenet21k


def get_config(argument=None):
    config = imagenet21k("ViT-B/16")
    # 90 epochs, 1e-3 linear to 1e-5, weight decay 0.03, dropout 0.1: shared by all models.
    return choose(config, argument)
