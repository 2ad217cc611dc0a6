"""ViT-B/16 as a masked autoencoder on ImageNet-1k, without its labels (2111.06377).

python -m vit_jax.main --config=configs/mae_b16.py --workdir=DIR
"""

from vit_jax.config import choose
from vit_jax.recipes import IMAGENET_IMAGES, masked_autoencoder


def get_config(argument=None):
    # Adam, cosine schedule to 0, weight decay 0.05, as in its fine-tuning.
    config = masked_autoencoder("ViT-B/16")
    config.objective.name = "mae"
    config.epochs = 800.0
    config.batch_size = 4096
    config.optimizer.learning_rate = 1.5e-4 * config.batch_size / 256
    config.optimizer.warmup_steps = round(40 * IMAGENET_IMAGES / config.batch_size)
    config.optimizer.beta2, config.optimizer.decay = 0.95, "matrices"
    config.model.initialization = "mae"
    # ImageNet's mean and std, as in the authors' code. Fine-tuning uses the checkpoint's values.
    config.model.mean, config.model.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    config.data.crop_area = (0.2, 1.0)
    return choose(config, argument)
