"""ViT-L/32 on ImageNet: the paper's pre-training (table 3).

The authors report 66.90 % validation accuracy at 224 pixels (vision_transformer, issue 62).

python -m vit_jax.main --config=configs/vit_l32_i1k.py --workdir=DIR
"""

from vit_jax.config import choose
from vit_jax.recipes import imagenet


def get_config(argument=None):
    config = imagenet("ViT-L/32")
    # 300 epochs, 3e-3 cosine, weight decay 0.3, dropout 0.1: shared by all models.
    return choose(config, argument)
