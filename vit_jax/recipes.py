"""The paper's set-ups by data set: pre-training (table 3) and fine-tuning (table 4).

Rates are those of the papers, but the update that has one may be its neighbour: ours are counted from 1,
those of vision_transformer, big_vision and PyTorch's schedulers from 0, as optimizer.count_from=0 does. It is
so where a recipe follows code line by line: masked autoencoders and the better plain baselines.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import base_config
from vit_jax.data.sources.vtab import TASKS
from vit_jax.errors import UserError, nearest

_IMAGENET = 1_281_167  # Training images,
_IMAGENET_99 = 1_268_355  # and those of train[:99%].


def imagenet(model: str) -> ConfigDict:
    """ImageNet-1k: 300 epochs, cosine, strong weight decay (tables 3 and 5, first block)."""
    config = _pretrain(model, dropout=0.1)
    config.epochs = 300.0
    config.data.path = "imagenet2012"
    config.data.train_split, config.data.dev_split = "train[:99%]", "train[99%:]"
    config.data.test_split = "validation"
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
    # Those of big_vision's vit_i21k.
    config.data.train_split, config.data.dev_split = "train[51200:]", "train[25600:51200]"
    config.data.test_split = "train[:25600]"
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


def plain_vit(epochs: int) -> ConfigDict:
    """ViT-S/16 on ImageNet-1k, "Better plain ViT baselines" (2205.01580): the values of big_vision's config.

    Its weight decay of 1e-4 is multiplied by the schedule but not by the learning rate of 1e-3; here it is
    their quotient. Its steps are rounded to the nearest.

    Args:
      epochs: 90, 150 or 300, as published; nothing else differs.
    """
    if epochs not in (90, 150, 300):
        raise UserError(f"no recipe for {epochs} epochs of this baseline; there are 90, 150 and 300")
    config = _pretrain("ViT-S/16", dropout=0.0)
    config.batch_size = 1024
    config.steps = round(epochs * _IMAGENET_99 / config.batch_size)
    config.model.update(dict(pooling="gap", position="sincos2d", dtype="float32"))
    config.data.path = "imagenet2012"
    config.data.train_split, config.data.dev_split = "train[:99%]", "train[99%:]"
    config.data.test_split = "validation"
    config.augment.update(dict(randaugment=(2, 10.0), mixup=0.2))
    config.loss.name = "softmax"
    config.optimizer.update(dict(learning_rate=1e-3, weight_decay=1e-4 / 1e-3, moment_dtype="bfloat16"))
    config.optimizer.count_from = 0
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    config.evaluate_every, config.checkpoint.every = 2500, 1000
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
    from vit_jax.models import takes  # JAX comes with it, which no `--help` should wait for.

    if takes(model, "pre_logits"):
        config.model.pre_logits, config.model.dropout = True, dropout
    config.model.dtype = "bfloat16"
    config.batch_size = 4096
    config.data.source = "tfds"
    config.data.image_size, config.data.test_resize = 224, 256
    config.data.crop_aspect = (0.75, 1.33)  # Of TensorFlow's operator where nothing is said; not 4/3.
    config.data.interpolation, config.data.test_interpolation = "bilinear", "area"  # As big_vision's.
    config.loss.name = "sigmoid"
    config.optimizer.schedule, config.optimizer.end_learning_rate = "linear", 1e-5
    config.optimizer.warmup_steps = 10_000
    config.optimizer.clip_norm = 1.0
    config.evaluate_every = 5000
    config.checkpoint.every = 2000
    return config


class Transfer(NamedTuple):
    """A row of the paper's table 4, and how it chooses the learning rate (appendix B.1.1)."""

    path: str  # TFDS's name.
    steps: int
    warmup: int  # The authors' code; the paper does not say.
    rates: tuple[float, ...]
    held_out: int  # Per cent of the training images on which the rates are compared.
    test_split: str = "test"


_RATES = (0.001, 0.003, 0.01, 0.03)
TRANSFER = {
    "imagenet2012": Transfer("imagenet2012", 20_000, 500, (0.003, 0.01, 0.03), 1, "validation"),
    "cifar100": Transfer("cifar100", 10_000, 500, _RATES, 2),
    "cifar10": Transfer("cifar10", 10_000, 500, _RATES, 2),
    "oxford_iiit_pet": Transfer("oxford_iiit_pet", 500, 100, _RATES, 10),
    "oxford_flowers102": Transfer("oxford_flowers102", 500, 100, _RATES, 10),
    "folder": Transfer("", 500, 100, _RATES, 10),  # The user's own; as the small sets of the paper.
}


def finetune(dataset: str, model: str = "", size: int = 384) -> ConfigDict:
    """Fine-tuning as in the paper's section 4.1 and table 4: SGD, batch 512, cosine, a new head.

    Args:
      dataset: one of `TRANSFER`, or `vtab/NAME` of one of VTAB-1k's tasks, which share one rate.
      model: the paper's name; empty takes the checkpoint's.
      size: of the images; 512 for L/16 and 518 for H/14 in table 2's ImageNet figures.
    """
    known = TRANSFER | {f"vtab/{name}": Transfer(name, 2500, 200, (0.01,), 20) for name in TASKS}
    if dataset not in known:
        raise UserError(f"no recipe for the data set {dataset!r}; {nearest(dataset, known)}")
    row = known[dataset]
    config = base_config()
    config.model.name, config.model.dtype = model, "bfloat16"
    config.batch_size, config.steps = 512, row.steps
    config.data.source, config.data.path = "tfds" if row.path else "folder", row.path
    config.data.train_split, config.data.test_split = "train", row.test_split
    config.data.image_size = size
    # As BiT: squeezed to 448, of which 384 are seen; a test image is seen whole.
    config.data.crop, config.data.crop_resize = "square", round(size * 448 / 384)
    config.data.test_crop, config.data.test_resize = "square", size
    config.data.interpolation = None  # The checkpoint's.
    config.optimizer.update(dict(name="sgd", beta1=0.9, weight_decay=0.0, clip_norm=1.0, schedule="cosine"))
    config.optimizer.warmup_steps = row.warmup
    config.optimizer.learning_rate = 0.01
    config.sweep.rates = row.rates
    if dataset == "imagenet2012":
        config.sweep.resnet_rates = (0.06,)
    kept = f"{100 - row.held_out}%"
    config.sweep.train_split, config.sweep.dev_split = f"[:{kept}]", f"[{kept}:]"
    if dataset.startswith("vtab/"):
        task = TASKS[row.path]
        config.data.source, config.data.train_split = "vtab", "train800val200"
        config.sweep.train_split, config.sweep.dev_split = "train800", "val200"
        config.data.flip, config.data.crop = task.flip, "square" if task.crop else "none"
    config.evaluate_every = config.checkpoint.every = min(500, row.steps)
    return config


def masked_patch(model: str) -> ConfigDict:
    """Masked patch prediction on JFT: the paper's self-supervision (section 4.6, appendix B.1.2)."""
    config = jft(model)
    config.epochs, config.steps = None, 1_000_000
    config.model.pre_logits, config.model.head_bias = False, 0.0
    config.objective.name, config.objective.target = "masked_patch", "color"
    config.optimizer.learning_rate = 2e-4
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    return config


def mae(model: str) -> ConfigDict:
    """Masked autoencoders on ImageNet-1k: 800 epochs (2111.06377, table 8)."""
    config = _mae(model)
    config.epochs = 800.0
    config.objective.name = "mae"
    config.model.initialization, config.optimizer.decay = "mae", "matrices"
    # ImageNet's, as they normalise; fine-tuning takes them from its checkpoint.
    config.model.mean, config.model.deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    config.data.crop_area = (0.2, 1.0)
    config.batch_size = 4096
    config.optimizer.learning_rate = 1.5e-4 * config.batch_size / 256
    config.optimizer.beta2 = 0.95
    config.optimizer.warmup_steps = round(40 * _IMAGENET / config.batch_size)
    return config


# Epochs, base learning rate, layer-wise decay and stochastic depth (2111.06377, table 9).
MAE_FINETUNE = {
    "ViT-B/16": (100.0, 5e-4, 0.65, 0.1),
    "ViT-L/16": (50.0, 1e-3, 0.75, 0.2),
    "ViT-H/14": (50.0, 1e-3, 0.75, 0.3),
}


def mae_finetune(model: str) -> ConfigDict:
    """Fine-tuning of a masked autoencoder's encoder on ImageNet-1k (2111.06377, table 9), as its code does.

    The class token stays, the patches' mean is normalised, and positions start fixed and are learned.
    """
    if model not in MAE_FINETUNE:
        raise UserError(f"no recipe for {model!r}; {nearest(model, MAE_FINETUNE)}")
    epochs, rate, layer_decay, stochastic_depth = MAE_FINETUNE[model]
    config = _mae(model)
    config.epochs = epochs
    config.model.update(dict(pooling="gap", cls_token=True, fc_norm=True, position="1d"))
    config.model.stochastic_depth = stochastic_depth
    config.batch_size = 1024
    config.augment.update(dict(policy="rand-m9-mstd0.5-inc1", mixup=0.8, cutmix=1.0, erasing=0.25))
    config.loss.label_smoothing = 0.1
    config.data.crop_area = (0.08, 1.0)
    config.optimizer.learning_rate = rate * config.batch_size / 256
    config.optimizer.layer_decay, config.optimizer.end_learning_rate = layer_decay, 1e-6
    config.optimizer.warmup_steps = round(5 * _IMAGENET / config.batch_size)
    return config


def _mae(model: str) -> ConfigDict:
    """What its pre-training and its fine-tuning share."""
    config = base_config()
    config.model.update(dict(name=model, position="sincos2d_mae", gelu="erf", dtype="bfloat16"))
    config.data.source, config.data.path = "tfds", "imagenet2012"
    config.data.train_split, config.data.test_split = "train", "validation"
    config.data.image_size, config.data.test_resize = 224, 256
    config.data.crop, config.data.interpolation = "random_resized", "bicubic"
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    config.optimizer.weight_decay, config.optimizer.clip_norm, config.optimizer.count_from = 0.05, 0.0, 0
    config.evaluate_every, config.checkpoint.every = 5000, 2000
    return config
