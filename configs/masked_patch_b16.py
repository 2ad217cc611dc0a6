"""ViT-B/16 by masked patch prediction, the paper's self-supervision (section 4.6, appendix B.1.2).

Labels are not read. --config.data.path=NAME is your own data set, prepared for TFDS, and
--config.data.source=folder --config.data.path=DIR a folder of images. The targets are
--config.objective.target=color, cells or pixels; 15 % is --config.objective.mask_ratio=0.15.

python -m vit_jax.main --config=configs/masked_patch_b16.py --workdir=DIR
"""

from vit_jax.config import choose
from vit_jax.recipes import masked_patch


def get_config(argument=None):
    return choose(masked_patch("ViT-B/16"), argument)
