"""The paper's pre-training set-ups by data set (table 3): what all models of a set share."""

from ml_collections import ConfigDict

from vit_jax.config import base_config
from vit_jax.errors import UserError, nearest


def imagenet(model: str) -> ConfigDict:
    """ImageNet-1k: 300 epochs, cosine, strong weight decay (tables 3 and 5, first block)."""
    config = _pretrain(model, dropout=0.1)
    config.epochs = 300.0
    config.data.path = "imagenet2012"
    config.data.train_split, config.data.test_split = "train[:99%]", "validation"
    config.loss.label_smoothing = 1e-4  # The authors, in vision_transformer's issue 34.
    config.optimizer.learning_rate = 3e-3
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    config.optimizer.weight_decay = 0.3
    return config


def imagenet21k(model: str) -> ConfigDict:
    """ImageNet-21k: 90 epochs, linear (table 3; the released checkpoints' set-up).

    TFDS has no ImageNet-21k: `data.path` names one that the user has prepared, and
    `data.num_classes` is the width of the published heads (the editions have fewer classes).
    """
    config = _pretrain(model, dropout=0.1)
    config.epochs = 90.0
    config.model.head_bias = -10.0
    config.data.path = "imagenet21k"
    config.data.train_split, config.data.test_split = "train[51200:]", "train[:51200]"
    config.data.num_classes = 21_843
    config.optimizer.learning_rate = 1e-3
    config.optimizer.weight_decay = 0.03
    return config


def jft(model: str) -> ConfigDict:
    """JFT-300M, or any multi-label data set of the user's: linear, no dropout (table 3)."""
    config = _pretrain(model, dropout=0.0)
    config.epochs = 7.0
    config.model.head_bias = -10.0
    config.data.path = "jft"
    config.data.train_split, config.data.test_split = "train", "validation"
    config.data.label_key = "labels"
    config.data.num_classes = 18_291
    config.optimizer.weight_decay = 0.1
    return config


# AugReg's level for each model on ImageNet-21k (big_vision's configs, from the paper's figure 4).
AUGREG_21K = {
    "ViT-Ti/16": "none",
    "ViT-S/32": "none",
    "ViT-S/16": "light1",
    "ViT-B/32": "light2",
    "ViT-B/16": "light2",
    "ViT-L/16": "medium2",
}


def augreg_imagenet(model: str) -> ConfigDict:
    """AugReg, "How to train your ViT?" (2106.10270), on ImageNet-1k: 300 epochs, the level by the model."""
    config = _augreg(imagenet(model))
    config.augment.level = {"ViT-Ti/16": "light1", "ViT-S/32": "medium1"}.get(model, "medium2")
    config.model.head_bias = -6.9
    return config


def augreg_imagenet21k(model: str) -> ConfigDict:
    """AugReg on ImageNet-21k: 300 epochs, the level by the model."""
    if model not in AUGREG_21K:
        raise UserError(
            f"AugReg's authors name no level for {model!r} on ImageNet-21k; {nearest(model, AUGREG_21K)}"
        )
    config = _augreg(imagenet21k(model))
    config.augment.level = AUGREG_21K[model]
    return config


def _augreg(config: ConfigDict) -> ConfigDict:
    """What all of AugReg's runs share, where the ViT paper's differ (section 3 of 2106.10270)."""
    config.epochs = 300.0
    config.model.pre_logits, config.model.dropout, config.model.stochastic_depth = False, 0.0, 0.0
    config.loss.label_smoothing = 0.0
    config.optimizer.learning_rate = 1e-3
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    config.optimizer.weight_decay = 0.1
    return config


def _pretrain(model: str, dropout: float) -> ConfigDict:
    """What all rows of table 3 share."""
    config = base_config()
    config.model.name = model
    config.model.head_bias = 0.0
    if "ViT" in model:  # A ResNet has neither.
        config.model.pre_logits, config.model.dropout = True, dropout
    config.model.dtype = "bfloat16"
    config.batch_size = 4096
    config.data.source = "tfds"
    config.data.image_size, config.data.test_resize = 224, 256
    config.data.workers, config.data.threads = 8, 4
    config.loss.name = "sigmoid"
    config.optimizer.schedule, config.optimizer.end_learning_rate = "linear", 1e-5
    config.optimizer.warmup_steps = 10_000
    config.optimizer.clip_norm = 1.0
    config.evaluate_every = 5000
    config.checkpoint.every = 2000
    return config
