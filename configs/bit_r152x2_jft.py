"""BiT-R152x2 on JFT-300M: the paper's pre-training (table 3).

--config.data.path=NAME gives your own data set, prepared for TFDS, with its labels in
the feature --config.data.label_key.

python -m vit_jax.main --config=configs/bit_r152x2_jft.py --workdir=DIR
"""

from vit_jax.config import choose
from vit_jax.recipes import jft


def get_config(argument=None):
    config = jft("BiT-R152x2")
    # The run of 14 epochs in table 6 is not in table 3; its rate is not published.
    config.epochs = 7.0
    config.optimizer.learning_rate = 6e-4
    return choose(config, argument)
