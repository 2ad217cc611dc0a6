r"""A ConvNeXt V2 as a masked autoencoder on ImageNet-1k, without its labels (FCMAE, 2301.00808).

    python -m vit_jax.main --config=configs/fcmae.py --workdir=DIR
    python -m vit_jax.main --config=configs/convnext.py:model=ConvNeXtV2-B,task=finetune_fcmae \
        --workdir=DIR2 --config.finetune.checkpoint=DIR

The values are from `main_pretrain.py` and TRAINING.md of facebookresearch/ConvNeXt-V2. The second
command fine-tunes the model as the authors do; B reaches 84.9 %. `model=` can be any ConvNeXt.
`--config.epochs=800` is the paper's shorter run.
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import IMAGENET_IMAGES, masked_autoencoder


def get_config(argument=None):
    values, argument = named_values(argument, model="ConvNeXtV2-B")
    # Adam, cosine schedule to 0, weight decay 0.05, as in MAE.
    config = masked_autoencoder(values["model"])
    config.model.position = config.model.gelu = None  # Options of ViTs only.
    config.objective.name = "fcmae"
    config.epochs = 1600.0
    config.batch_size = 4096
    config.optimizer.learning_rate = 1.5e-4 * config.batch_size / 256
    config.optimizer.warmup_steps = round(40 * IMAGENET_IMAGES / config.batch_size)
    config.optimizer.beta2, config.optimizer.decay = 0.95, "matrices"
    # ImageNet's mean and std, as in the authors' code. Fine-tuning uses the checkpoint's values.
    config.model.mean, config.model.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    config.data.crop_area = (0.2, 1.0)
    return choose(config, argument)
