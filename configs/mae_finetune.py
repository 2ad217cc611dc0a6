"""Fine-tuning of a masked autoencoder's encoder on ImageNet-1k (2111.06377, table 9).

    python -m vit_jax.main --config=configs/mae_finetune.py:model=ViT-B/16 --workdir=DIR \\
        --config.finetune.checkpoint=MAE_WORKDIR

Models: ViT-B/16, ViT-L/16, ViT-H/14, for which the authors' code reports 83.6, 85.9 and 86.9 % validation
accuracy after 1,600 epochs of pre-training. Layer-wise decay, stochastic depth, timm's RandAugment, mixup,
CutMix, random erasing.
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import mae_finetune


def get_config(argument=None):
    values, argument = named_values(argument, model="ViT-B/16")
    return choose(mae_finetune(values["model"]), argument)
