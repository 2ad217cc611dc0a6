"""A small ViT on images that can be as many as one likes: digits, characters or an alphabet on clutter.

python -m vit_jax.main --config=configs/scattered_s.py --workdir=DIR --config.data.path=glyphs
"""

from vit_jax.config import base_config, choose


def get_config(argument=None):
    config = base_config()
    config.batch_size, config.epochs = 128, 30.0
    config.model.name = "ViT-Ti/4"
    config.model.update(dict(dim=64, depth=4, hidden=256, heads=4))
    config.data.source, config.data.path = "scattered", "digits"
    config.data.train_split, config.data.test_split = "train[:10000]", "test[:2000]"
    config.data.image_size, config.data.test_resize = 32, 32
    # A digit must keep its shape and may not be mirrored, and the largest object must stay in the picture.
    config.data.crop = "random_resized"
    config.data.crop_area, config.data.crop_aspect, config.data.flip = (0.7, 1.0), (0.8, 1.25), False
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 1e-3, 200
    config.log_every, config.evaluate_every, config.checkpoint.every = 100, 1000, 1000
    return choose(config, argument)
