"""ViT-H/14 as a masked autoencoder on ImageNet-1k, without its labels (2111.06377).

python -m vit_jax.main --config=configs/mae_h14.py --workdir=DIR
"""

from vit_jax.config import choose
from vit_jax.recipes import mae


def get_config(argument=None):
    return choose(mae("ViT-H/14"), argument)
