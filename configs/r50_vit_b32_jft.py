"""R50+ViT-B/32 on JFT-300M: the paper's pre-training (table 3).

JFT-300M is not public. To train on a data set of your own, prepare it for TFDS, and set its name
with --config.data.path=NAME and the feature of its labels with --config.data.label_key=FEATURE.

python -m vit_jax.main --config=configs/r50_vit_b32_jft.py --workdir=DIR
"""

from vit_jax.config import choose
from vit_jax.recipes import pretraining


def get_config(argument=None):
    # Batch 4096, Adam, 10,000 steps of warm-up, clipping at 1.
    config = pretraining("R50+ViT-B/32")
    config.epochs = 7.0
    config.optimizer.learning_rate, config.optimizer.weight_decay = 8e-4, 0.1
    config.optimizer.schedule, config.optimizer.end_learning_rate = "linear", 1e-5
    config.model.dropout, config.model.pre_logits, config.model.head_bias = 0.0, True, -10.0
    config.data.path, config.data.num_classes, config.data.label_key = "jft", 18_291, "labels"
    config.data.train_split, config.data.test_split = "train", "validation"
    return choose(config, argument)
