"""ViT-B/16 by masked patch prediction, the paper's self-supervised training (section 4.6, B.1.2).

Labels are not read. JFT-300M is not public: train on a folder of images with
--config.data.source=folder --config.data.path=DIR, or on a data set that is prepared for TFDS with
--config.data.path=NAME. --config.masked_patch.target=color, cells or pixels sets the target.
--config.masked_patch.mask_ratio=0.15 masks 15 % of the patches instead of half.

python -m vit_jax.main --config=configs/masked_patch_b16.py --workdir=DIR
"""

from vit_jax.config import choose
from vit_jax.recipes import pretraining


def get_config(argument=None):
    config = pretraining("ViT-B/16")  # Batch 4096, Adam, 10,000 steps of warm-up, clipping at 1.
    config.steps = 1_000_000
    config.objective.name, config.masked_patch.target = "masked_patch", "color"
    config.loss.name = "softmax"  # The default value. This objective does not use it.
    config.optimizer.learning_rate, config.optimizer.weight_decay = 2e-4, 0.1
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    config.model.dropout, config.model.pre_logits = 0.0, False
    config.data.path, config.data.num_classes, config.data.label_key = "jft", 18_291, "labels"
    config.data.train_split, config.data.test_split = "train", "validation"
    return choose(config, argument)
