r"""Training without labels on your own images, with all values chosen from images and device.

Two commands for the same run:

    python -m vit_jax.main --config=configs/my_images_unlabelled.py --config.data.path=PHOTOS \
        --workdir=DIR
    vit-jax pretrain PHOTOS

It continues the training of a pre-trained model with DINOv2's losses (2304.07193), at a low
learning rate. Each choice is printed with its reason and with the flag that changes it; the rules
are in vit_jax/runs/choices/pretraining.py. The papers' own recipes are configs/dino.py,
configs/dinov2.py and configs/dinov3.py.
"""

from vit_jax.config import choose
from vit_jax.recipes import DINOV2, self_distillation

ON = DINOV2._replace(
    epochs=1,
    epoch=1000,
    learning_rate=1e-5,
    warmup=0.1,
    weight_decay=(0.04, 0.04),
    temperature=(0.07, 0.07),
    temperature_warmup=0,
    frozen=0,
)


def get_config(argument=None):
    config = self_distillation(ON, 64)
    config.auto = "pretrain"
    config.model.update(dict(name="", dtype="float32", mean=None, std=None))
    config.data.source, config.data.path = "folder", ""
    config.data.train_split, config.data.dev_split = "all[:90%]", "all[90%:95%]"
    config.data.test_split = "all[95%:]"
    config.dino.update(
        dict(prototypes=4096, prototype_lengths="learned", patch_weight=1.0, koleo=0.1)
    )
    config.optimizer.layer_decay, config.optimizer.clip = 0.9, "module"
    config.evaluate_every = config.checkpoint.every = 250
    return choose(config, argument)
