"""BiT-S: a BiT on ImageNet, with the values of its own paper (1912.11370, section 3.2).

These models are in figure 3 of the ViT paper, as a shaded band. The ViT paper does not describe how
its ResNets were trained on ImageNet. Fine-tuned by BiT-HyperRule at 480 pixels, BiT-R152x4 reaches
81.30 %. BiT's paper does not specify the loss; the loss here is that of big_vision's config for BiT
on ImageNet.

python -m vit_jax.main --config=configs/bit_i1k.py:model=BiT-R50x1 --workdir=DIR
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import bit_pretraining


def get_config(argument=None):
    values, argument = named_values(argument, model="BiT-R50x1")
    config = bit_pretraining(values["model"])  # Batch 4096, SGD, 5000 steps of warm-up.
    config.epochs, config.optimizer.stairs = 90.0, (30 / 90, 60 / 90, 80 / 90)
    config.loss.name, config.model.head_bias = "softmax", 0.0
    config.data.path = "imagenet2012"
    config.data.train_split, config.data.dev_split = "train[:99%]", "train[99%:]"
    config.data.test_split = "validation"
    return choose(config, argument)
