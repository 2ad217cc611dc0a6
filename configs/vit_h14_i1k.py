"""ViT-H/14 on ImageNet: the paper's pre-training (table 3).

Not a run of the paper, which trained B and L on ImageNet: the values of its row "ViT (all)".

python -m vit_jax.main --config=configs/vit_h14_i1k.py --workdir=DIR
"""

from vit_jax.config import choose
from vit_jax.recipes import imagenet


def get_config(argument=None):
    config = imagenet("ViT-H/14")
    # 300 epochs, 3e-3 cosine, weight decay 0.3, dropout 0.1: shared by all models.
    return choose(config, argument)
