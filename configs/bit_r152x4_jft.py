"""BiT-L: BiT-R152x4 on JFT-300M, with the values of its own paper (1912.11370, section 3.2).

The ViT paper compares with this model in table 2. Its appendix D.1 states that BiT is trained for
30 epochs (table 7), but BiT's own paper has 40. To train on a data set of your own, prepare it for
TFDS and set --config.data.path=NAME and --config.data.label_key=FEATURE.

python -m vit_jax.main --config=configs/bit_r152x4_jft.py --workdir=DIR
"""

from vit_jax.config import choose
from vit_jax.recipes import bit_pretraining


def get_config(argument=None):
    config = bit_pretraining("BiT-R152x4")  # Batch 4096, SGD, 5000 steps of warm-up.
    config.epochs, config.optimizer.stairs = 40.0, (10 / 40, 23 / 40, 30 / 40, 37 / 40)
    config.loss.name, config.model.head_bias = "sigmoid", -10.0  # As on ImageNet-21k.
    config.data.path, config.data.num_classes, config.data.label_key = "jft", 18_291, "labels"
    config.data.train_split, config.data.test_split = "train", "validation"
    return choose(config, argument)
