"""BiT-M: a BiT on ImageNet-21k, with the values of its own paper (1912.11370, section 3.2).

These models are in figure 3 of the ViT paper, as a shaded band. Fine-tuned on ImageNet by
BiT-HyperRule at 480 pixels, BiT-R152x4 reaches 85.39 %. BiT's paper does not specify the loss; the
loss and the head's initial bias are those of big_vision's config for BiT on ImageNet-21k.

python -m vit_jax.main --config=configs/bit_i21k.py:model=BiT-R50x1 --workdir=DIR
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import bit_pretraining


def get_config(argument=None):
    values, argument = named_values(argument, model="BiT-R50x1")
    config = bit_pretraining(values["model"])  # Batch 4096, SGD, 5000 steps of warm-up.
    config.epochs, config.optimizer.stairs = 90.0, (30 / 90, 60 / 90, 80 / 90)
    config.loss.name, config.model.head_bias = "sigmoid", -10.0
    # The published heads have 21,843 classes.
    config.data.path, config.data.num_classes = "imagenet21k", 21_843
    # The splits of configs/vit_b16_i21k.py.
    config.data.train_split, config.data.dev_split = "train[51200:]", "train[25600:51200]"
    config.data.test_split = "train[:25600]"
    return choose(config, argument)
