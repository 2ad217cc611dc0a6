r"""Fine-tuning of a masked autoencoder's encoder on ImageNet-1k (2111.06377, table 9).

    python -m vit_jax.main --config=configs/mae_finetune.py:model=ViT-B/16 --workdir=DIR \
        --config.finetune.checkpoint=MAE_WORKDIR

The models are ViT-B/16, ViT-L/16 and ViT-H/14. After 1,600 epochs of pre-training, the authors
report 83.6, 85.9 and 86.9 % validation accuracy. The recipe uses layer-wise learning rate decay,
stochastic depth, timm's RandAugment, mixup, CutMix and random erasing.
"""

from vit_jax.config import choose, named_values
from vit_jax.errors import UserError, nearest
from vit_jax.recipes import IMAGENET_IMAGES, masked_autoencoder

# Epochs, base learning rate, layer-wise learning rate decay and stochastic depth.
TABLE_9 = {
    "ViT-B/16": (100.0, 5e-4, 0.65, 0.1),
    "ViT-L/16": (50.0, 1e-3, 0.75, 0.2),
    "ViT-H/14": (50.0, 1e-3, 0.75, 0.3),
}


def get_config(argument=None):
    values, argument = named_values(argument, model="ViT-B/16")
    model = values["model"]
    if model not in TABLE_9:
        raise UserError(f"no recipe for {model!r}; {nearest(model, TABLE_9)}")
    config = masked_autoencoder(model)  # Adam, cosine, weight decay 0.05, as in its pre-training.
    config.epochs, rate, config.optimizer.layer_decay, config.model.stochastic_depth = TABLE_9[
        model
    ]
    config.batch_size = 1024
    config.optimizer.learning_rate = rate * config.batch_size / 256
    config.optimizer.end_learning_rate = 1e-6
    config.optimizer.warmup_steps = round(5 * IMAGENET_IMAGES / config.batch_size)
    # As in the authors' code, the class token stays in the sequence, the head reads the normalized
    # mean of the patches, and learned position embeddings start from the fixed ones.
    config.model.update(dict(pooling="gap", cls_token=True, fc_norm=True, position="1d"))
    config.augment.update(dict(policy="rand-m9-mstd0.5-inc1", mixup=0.8, cutmix=1.0, erasing=0.25))
    config.loss.label_smoothing = 0.1
    config.data.crop_area = (0.08, 1.0)
    return choose(config, argument)
