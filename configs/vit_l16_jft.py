"""ViT-L/16 on JFT-300M: the paper's pre-training (table 3).

14 epochs as in tables 2 and 5; --config.epochs=7 is the shorter run of table 6.

--config.data.path=NAME gives your own data set, prepared for TFDS, with its labels in
the feature --config.data.label_key.

python -m vit_jax.main --config=configs/vit_l16_jft.py --workdir=DIR
"""

from vit_jax.config import choose
from vit_jax.recipes import jft


def get_config(argument=None):
    config = jft("ViT-L/16")
    config.epochs = 14.0
    config.optimizer.learning_rate = 4e-4
    return choose(config, argument)
