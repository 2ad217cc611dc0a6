"""A small ViT on scikit-learn's digits: a minute and a half on two CPU cores, nothing to download.

python -m vit_jax.main --config=configs/quickstart.py --workdir=/tmp/quickstart
"""

from vit_jax.config import base_config, choose


def get_config(argument=None):
    config = base_config()
    config.batch_size = 128
    config.epochs = 140.0
    config.model.name = "ViT-Ti/4"
    config.model.update(dict(dim=64, depth=3, mlp_dim=128, heads=4))
    config.data.source = "digits"
    # The scans have 8x8 pixels. Twice this size allows finer crops.
    config.data.image_size, config.data.test_resize = 16, 16
    # Digits must not be distorted or mirrored.
    config.data.crop = "random_resized"
    config.data.crop_area, config.data.crop_aspect, config.data.flip = (
        (0.6, 1.0),
        (0.8, 1.25),
        False,
    )
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.log_every, config.evaluate_every, config.checkpoint.every = 50, 400, 400
    return choose(config, argument)
