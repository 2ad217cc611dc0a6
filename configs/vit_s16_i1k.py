"""ViT-S/16 on ImageNet-1k, "Better plain ViT baselines" (2205.01580), for 90, 150 or 300 epochs.

    python -m vit_jax.main --config=configs/vit_s16_i1k.py:epochs=90 --workdir=DIR

The authors report 76.5, 78.5 and 80.0 % validation accuracy. The values are from big_vision's
config of the same name. There are two differences. big_vision's mixup pairs images of the same
device; here it pairs images of the whole batch. big_vision shuffles images in a buffer of 250,000;
here all images are shuffled.
"""

from vit_jax.config import choose, named_values
from vit_jax.errors import UserError
from vit_jax.recipes import pretraining

IMAGES = 1_268_355  # In train[:99%].


def get_config(argument=None):
    values, argument = named_values(argument, epochs="90")
    if values["epochs"] not in ("90", "150", "300"):
        raise UserError(f"epochs={values['epochs']} must be 90, 150 or 300")
    config = pretraining("ViT-S/16")  # Adam, 10,000 steps of warm-up, clipping at 1.
    config.batch_size = 1024
    config.steps = round(int(values["epochs"]) * IMAGES / config.batch_size)
    # big_vision multiplies the weight decay of 1e-4 by the schedule, but not by the learning rate.
    config.optimizer.learning_rate, config.optimizer.weight_decay = 1e-3, 1e-4 / 1e-3
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    config.optimizer.moment_dtype, config.optimizer.count_from = "bfloat16", 0
    config.model.dropout, config.model.pre_logits, config.model.head_bias = 0.0, True, 0.0
    config.model.pooling, config.model.position, config.model.dtype = "gap", "sincos2d", "float32"
    config.loss.name = "softmax"
    config.augment.randaugment, config.augment.mixup = (2, 10.0), 0.2
    config.data.path = "imagenet2012"
    config.data.train_split, config.data.dev_split = "train[:99%]", "train[99%:]"
    config.data.test_split = "validation"
    config.evaluate_every, config.checkpoint.every = 2500, 1000
    return choose(config, argument)
