"""ViT-B/32 on ImageNet-21k: the paper's pre-training (table 3).

The authors report a precision at 1 of 44.04 % on held-out images (vision_transformer, issue 62).

python -m vit_jax.main --config=configs/vit_b32_i21k.py --workdir=DIR
"""

from vit_jax.config import choose
from vit_jax.recipes import pretraining


def get_config(argument=None):
    config = pretraining("ViT-B/32")  # Batch 4096, Adam, 10,000 steps of warm-up, clipping at 1.
    config.epochs = 90.0
    config.optimizer.learning_rate, config.optimizer.weight_decay = 1e-3, 0.03
    config.optimizer.schedule, config.optimizer.end_learning_rate = "linear", 1e-5
    config.model.dropout, config.model.pre_logits, config.model.head_bias = 0.1, True, -10.0
    # The published heads have 21,843 classes.
    config.data.path, config.data.num_classes = "imagenet21k", 21_843
    # The splits of big_vision's vit_i21k.
    config.data.train_split, config.data.dev_split = "train[51200:]", "train[25600:51200]"
    config.data.test_split = "train[:25600]"
    return choose(config, argument)
