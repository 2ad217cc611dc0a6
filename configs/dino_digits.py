"""A small ViT on scikit-learn's digits without their labels, by self-distillation (2104.14294).

python -m vit_jax.main --config=configs/dino_digits.py --workdir=DIR
"""

from vit_jax.config import base_config, choose


def get_config(argument=None):
    config = base_config()
    config.objective.name = "dino"
    config.dino.update(dict(head_hidden=256, prototypes=256, teacher_momentum=0.99, local_crops=0))
    config.dino.update(dict(jitter=(0.0,) * 4, grey=0.0, blur=(0.0,) * 3, solarize=(0.0,) * 3))
    config.batch_size, config.epochs = 128, 70.0
    config.model.name = "ViT-Ti/4"
    config.model.update(dict(dim=64, depth=3, mlp_dim=128, heads=4))
    config.data.source = "digits"
    config.data.image_size, config.data.test_resize = 16, 16
    config.data.crop = "random_resized"
    config.data.crop_area, config.data.crop_aspect, config.data.flip = (
        (0.4, 1.0),
        (0.8, 1.25),
        False,
    )
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 1e-3, 100
    config.optimizer.clip_norm = 3.0
    config.log_every, config.evaluate_every, config.checkpoint.every = 50, 400, 400
    return choose(config, argument)
