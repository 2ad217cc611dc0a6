"""R50+ViT-L/32 on JFT-300M: the paper's pre-training (table 3).

--config.data.path=NAME gives your own data set, prepared for TFDS, with its labels in
the feature --config.data.label_key.

python -m vit_jax.main --config=configs/r50_vit_l32_jft.py --workdir=DIR
"""

from vit_jax.config import choose
from vit_jax.recipes import jft


def get_config(argument=None):
    config = jft("R50+ViT-L/32")
    config.epochs = 7.0
    config.optimizer.learning_rate = 2e-4
    return choose(config, argument)
