"""ViT-H/14 on ImageNet: the paper's pre-training (table 3).

The paper trains only B and L on ImageNet, not this model. The values are those of the row "ViT
(all)" in table 3.

python -m vit_jax.main --config=configs/vit_h14_i1k.py --workdir=DIR
"""

from vit_jax.config import choose
from vit_jax.recipes import pretraining


def get_config(argument=None):
    config = pretraining("ViT-H/14")  # Batch 4096, Adam, 10,000 steps of warm-up, clipping at 1.
    config.epochs = 300.0
    config.optimizer.learning_rate, config.optimizer.weight_decay = 3e-3, 0.3
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    config.model.dropout, config.model.pre_logits, config.model.head_bias = 0.1, True, 0.0
    config.loss.label_smoothing = 1e-4  # According to the authors (vision_transformer, issue 34).
    config.data.path = "imagenet2012"
    config.data.train_split, config.data.dev_split = "train[:99%]", "train[99%:]"
    config.data.test_split = "validation"
    return choose(config, argument)
