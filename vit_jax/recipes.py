"""Recipes that config files share: the paper's (tables 3 and 4), masked autoencoders, BiT, DeiT and
after.

Rates are those of the papers, but the update that has one may be its neighbour: ours are counted
from 1, those of vision_transformer, big_vision and PyTorch's schedulers from 0, as
optimizer.count_from=0 does. It is
so where a recipe follows code line by line: masked autoencoders and the better plain baselines.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import base_config
from vit_jax.data.sources.vtab import TASKS
from vit_jax.errors import UserError, nearest

IMAGENET_IMAGES = 1_281_167  # To train on.
IMAGENET_21K_IMAGES = 14_197_122  # Of the release of fall 2011, which has 21,841 classes.


def pretraining(model: str) -> ConfigDict:
    """The values of all rows of table 3: batch 4096, Adam, warm-up, clipping (section 4.1)."""
    config = base_config()
    config.model.name = model
    config.model.head_bias = 0.0
    config.model.dtype = "bfloat16"
    config.batch_size = 4096
    config.data.source = "tfds"
    config.data.image_size, config.data.test_resize = 224, 256
    config.data.crop_aspect = (
        0.75,
        1.33,
    )  # Of TensorFlow's operator where nothing is said; not 4/3.
    config.data.interpolation, config.data.test_interpolation = (
        "bilinear",
        "area",
    )  # As big_vision's.
    config.loss.name = "sigmoid"
    config.optimizer.schedule, config.optimizer.end_learning_rate = "linear", 1e-5
    config.optimizer.warmup_steps = 10_000
    config.optimizer.clip_norm = 1.0
    config.evaluate_every = 5000
    config.checkpoint.every = 2000
    return config


def bit_pretraining(model: str) -> ConfigDict:
    """The values that BiT's own pre-training shares (1912.11370, section 3.2): SGD in place of
    Adam.
    """
    config = pretraining(model)
    config.optimizer.update(dict(name="sgd", beta1=0.9, schedule="stairs", end_learning_rate=0.0))
    config.optimizer.update(dict(warmup_steps=5000, clip_norm=0.0))
    config.optimizer.learning_rate = 0.03 * config.batch_size / 256
    config.optimizer.weight_decay, config.optimizer.coupled_decay = 1e-4, True
    return config


def masked_autoencoder(model: str) -> ConfigDict:
    """The values of masked autoencoders on ImageNet-1k, trained or fine-tuned (2111.06377)."""
    config = base_config()
    config.model.update(dict(name=model, position="sincos2d_mae", gelu="erf", dtype="bfloat16"))
    config.data.source, config.data.path = "tfds", "imagenet2012"
    config.data.train_split, config.data.test_split = "train", "validation"
    config.data.image_size, config.data.test_resize = 224, 256
    config.data.crop, config.data.interpolation = "random_resized", "bicubic"
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    config.optimizer.weight_decay, config.optimizer.clip_norm, config.optimizer.count_from = (
        0.05,
        0.0,
        0,
    )
    config.evaluate_every, config.checkpoint.every = 5000, 2000
    return config


class Masked(NamedTuple):
    """A pre-training of EVA, EVA-02 or BEiT: epochs, batch, rate, epochs of warm-up, stochastic
    depth.
    """

    epochs: int
    batch: int
    learning_rate: float
    warmup: int
    stochastic_depth: float


def masked_features(model: str, row: Masked, teacher: str) -> ConfigDict:
    """The values that EVA and EVA-02 share in pre-training, here on ImageNet-21k, without its
    labels.
    """
    config = _like_eva(
        model, row.epochs, row.batch, row.learning_rate, row.warmup, IMAGENET_21K_IMAGES
    )
    # The names are those of fine-tuned models, whose norm is behind the pooling.
    config.model.update(
        dict(pooling="gap", cls_token=True, fc_norm=False, stochastic_depth=row.stochastic_depth)
    )
    config.model.mean = (
        0.48145466,
        0.4578275,
        0.40821073,
    )  # CLIP's; fine-tuning takes the checkpoint's.
    config.model.std = (0.26862954, 0.26130258, 0.27577711)
    config.objective.update(dict(name="eva", teacher=teacher, teacher_features="head"))
    config.objective.teacher_dtype = "bfloat16"
    config.data.path, config.data.train_split, config.data.test_split = (
        "imagenet21k",
        "train[51200:]",
        "train[:25600]",
    )
    config.data.image_size, config.data.test_resize, config.data.crop_area = 224, 256, (0.2, 1.0)
    config.optimizer.end_learning_rate = (
        1e-5  # The warm-up begins at 0: their --warmup_lr is not read.
    )
    config.optimizer.beta2, config.optimizer.epsilon, config.optimizer.clip_norm = 0.98, 1e-6, 3.0
    return config


class Tuned(NamedTuple):
    """A fine-tuning of EVA, EVA-02 or BEiT: pixels, epochs, batch, rate, epochs of warm-up, and the
    rest.
    """

    size: int
    epochs: int
    batch: int
    learning_rate: float
    warmup: int
    layer_decay: float
    stochastic_depth: float
    smoothing: float
    least_area: float = 0.08


def tuned_features(model: str, row: Tuned, i21k: bool) -> ConfigDict:
    """The values that EVA and EVA-02 share in fine-tuning on ImageNet-1k, or on 21k.

    On ImageNet-1k they are evaluated by an average of their parameters.
    """
    images = IMAGENET_21K_IMAGES if i21k else IMAGENET_IMAGES
    config = _like_eva(model, row.epochs, row.batch, row.learning_rate, row.warmup, images)
    config.model.update(
        dict(pooling="gap", cls_token=True, fc_norm=True, stochastic_depth=row.stochastic_depth)
    )
    config.data.path, config.data.train_split, config.data.test_split = (
        "imagenet2012",
        "train",
        "validation",
    )
    if i21k:
        config.data.path, config.data.train_split = "imagenet21k", "train[51200:]"
        config.data.dev_split, config.data.test_split = "train[25600:51200]", "train[:25600]"
    config.data.image_size = config.data.test_resize = row.size
    config.data.crop_area = (row.least_area, 1.0)
    config.augment.policy, config.loss.label_smoothing = "rand-m9-mstd0.5-inc1", row.smoothing
    config.optimizer.layer_decay, config.optimizer.clip_norm = row.layer_decay, 0.0
    if not i21k:
        config.optimizer.average, config.optimizer.average_from = 0.9999, "weights"
    return config


def masked_codes(model: str, row: Masked, i21k: bool) -> ConfigDict:
    """The values of BEiT's pre-training on ImageNet-21k or 1k, without labels and without its
    tokeniser.
    """
    config = _like_eva(
        model,
        row.epochs,
        row.batch,
        row.learning_rate,
        row.warmup,
        IMAGENET_21K_IMAGES if i21k else IMAGENET_IMAGES,
    )
    # The names are those of fine-tuned models, whose norm is behind the pooling, each layer with
    # its biases.
    config.model.update(
        dict(
            pooling="gap",
            cls_token=True,
            fc_norm=False,
            position_at="shared",
            initialization="beit",
        )
    )
    config.model.stochastic_depth = row.stochastic_depth
    config.objective.name = "beit"
    config.data.path, config.data.train_split, config.data.test_split = (
        "imagenet2012",
        "train",
        "validation",
    )
    if i21k:
        config.data.path, config.data.train_split = "imagenet21k", "train[51200:]"
        config.data.test_split = "train[:25600]"
    else:
        config.model.mean, config.model.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    config.data.image_size, config.data.test_resize, config.data.crop_area = 224, 256, (0.08, 1.0)
    config.augment.color_jitter = (0.4, 0.4, 0.4)  # The tokeniser sees the same.
    config.optimizer.end_learning_rate = (
        1e-5  # The warm-up begins at 0: their --warmup_lr is not read.
    )
    config.optimizer.clip_norm = 3.0
    return config


def tuned_codes(
    model: str, row: Tuned, i21k: bool, mixed: bool, weight_decay: float, clip: float
) -> ConfigDict:
    """The values of BEiT's fine-tuning on ImageNet-1k, or on 21k.

    Args:
      mixed: with mixup and CutMix.
      clip: the gradient's largest length; 0: it has none.
    """
    config = tuned_features(model, row, i21k)
    config.model.position_at = (
        "stem"  # Each layer has its own table of biases, at first the shared one.
    )
    config.augment.erasing = 0.25
    if mixed:
        config.augment.mixup, config.augment.cutmix = 0.8, 1.0
    config.data.test_resize = row.size if row.size >= 384 else row.size * 256 // 224
    config.optimizer.update(
        dict(average=0.0, average_from="zero", weight_decay=weight_decay, clip_norm=clip)
    )
    config.optimizer.end_learning_rate = 1e-6
    return config


def _like_eva(
    model: str, epochs: int, batch: int, rate: float, warmup: int, images: int
) -> ConfigDict:
    """The values that the pre-training and fine-tuning of EVA, EVA-02 and BEiT share."""
    config = base_config()
    config.model.name, config.model.dtype = model, "bfloat16"
    config.epochs, config.batch_size = float(epochs), batch
    config.data.source, config.data.crop, config.data.interpolation = (
        "tfds",
        "random_resized",
        "bicubic",
    )
    config.optimizer.learning_rate = rate
    config.optimizer.weight_decay, config.optimizer.decay = 0.05, "tables"
    config.optimizer.warmup_steps = round(warmup * images / batch)
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    config.optimizer.count_from = 0
    config.evaluate_every, config.checkpoint.every = 5000, 2000
    return config


class TeacherRecipe(NamedTuple):
    """The schedules of a self-distillation, in the epochs of its authors.

    Attributes:
      epochs: of the run.
      epoch: steps of an epoch.
      learning_rate: at the end of the warm-up.
      warmup, temperature_warmup, frozen: epochs of the rate's and of the teacher's temperature's
        warm-up, and those in which the prototypes do not move.
      weight_decay: at first and at the end.
      momentum: of the teacher at first.
      temperature: of the teacher at first and after its warm-up.
      area, local_area: shares of an image's area in large and in small crops.
      blur: probabilities of the first large view, the second, and small ones.
    """

    epochs: float
    epoch: int
    learning_rate: float
    warmup: float
    weight_decay: tuple[float, float]
    momentum: float
    area: tuple[float, float]
    local_area: tuple[float, float]
    temperature: tuple[float, float] = (0.04, 0.04)
    temperature_warmup: float = 0
    frozen: float = 1
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)


# DINOv2's short run; the later ones differ in a few of these.
DINOV2 = TeacherRecipe(
    epochs=100,
    epoch=1250,  # Steps, as the authors count.
    learning_rate=4e-3 * (2048 / 1024) ** 0.5,
    warmup=10,
    weight_decay=(0.04, 0.4),
    momentum=0.992,
    area=(0.32, 1.0),
    local_area=(0.05, 0.32),
    temperature=(0.04, 0.07),
    temperature_warmup=30,
    blur=(
        0.0,
        0.9,
        0.5,
    ),  # What the authors' code does; it reads its probabilities the other way round.
)


def self_distillation(recipe: TeacherRecipe, batch_size: int, local_size: int = 96) -> ConfigDict:
    """The values that DINO, DINOv2 and DINOv3 share: views, their colours, and the optimizer.

    Two crops of 224 pixels and eight small ones, mirrored, with the colours of BYOL (2006.07733,
    table 6); AdamW with cosines of the rate, the weight decay and the teacher's momentum.
    """
    config = base_config()
    config.model.dtype, config.model.pooling = "bfloat16", "cls"
    config.model.mean, config.model.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    config.batch_size, config.steps = batch_size, round(recipe.epochs * recipe.epoch)
    config.data.source, config.data.path = "tfds", "imagenet2012"
    config.data.train_split, config.data.test_split = "train", "validation"
    config.data.image_size, config.data.test_resize = 224, 256
    config.data.interpolation, config.data.crop = "bicubic", "random_resized"
    config.data.crop_area, config.data.crop_aspect = recipe.area, (3 / 4, 4 / 3)
    config.objective.name = "dino"
    config.dino.local_crops, config.dino.local_size = 8, local_size
    config.dino.local_area = recipe.local_area
    config.dino.jitter, config.dino.jitter_probability = (0.4, 0.4, 0.2, 0.1), 0.8
    config.dino.grey, config.dino.blur, config.dino.solarize = 0.2, recipe.blur, (0.0, 0.2, 0.0)
    config.dino.teacher_momentum = recipe.momentum
    config.dino.teacher_temperature, config.dino.teacher_temperature_end = recipe.temperature
    config.dino.teacher_temperature_steps = round(recipe.temperature_warmup * recipe.epoch)
    config.dino.frozen_prototype_steps = round(recipe.frozen * recipe.epoch)
    config.optimizer.learning_rate, config.optimizer.end_learning_rate = recipe.learning_rate, 1e-6
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = round(recipe.warmup * recipe.epoch)
    config.optimizer.weight_decay, config.optimizer.weight_decay_end = recipe.weight_decay
    config.optimizer.decay, config.optimizer.beta2 = "matrices", 0.999
    config.optimizer.clip_norm, config.optimizer.count_from = 3.0, 0
    config.evaluate_every, config.checkpoint.every = 12_500, 2500
    return config


def deit_like(
    model: str, task: str, skipped: Mapping[str, Mapping[str, float]], size: int
) -> ConfigDict:
    """The values that training on ImageNet shares in DeiT, Swin and ConvNeXt: augmentation, cosine
    decay.

    Args:
      task: a key of `skipped`: `i21k` is on ImageNet-21k, the others on ImageNet-1k.
      skipped: stochastic depth by task and model.
      size: of the images; test images of 384 pixels and more are squeezed whole, smaller ones
        cropped.

    Raises:
      UserError: there is no such task, or it has no such model.
    """
    if task not in skipped:
        raise UserError(f"no recipe for task={task}; {nearest(task, skipped)}")
    if model not in skipped[task]:
        raise UserError(f"no recipe for {model!r} and task={task}; {nearest(model, skipped[task])}")
    config = base_config()
    config.model.name, config.model.dtype = model, "bfloat16"
    config.model.stochastic_depth = skipped[task][model]
    config.data.source, config.data.path = "tfds", "imagenet2012"
    config.data.train_split, config.data.test_split = "train", "validation"
    if task == "i21k":
        config.data.path, config.data.train_split = "imagenet21k", "train[51200:]"
        config.data.dev_split, config.data.test_split = "train[25600:51200]", "train[:25600]"
    if not task.startswith("finetune"):
        # ImageNet's, by which the authors normalise; fine-tuning takes them from its checkpoint.
        config.model.mean, config.model.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    config.data.crop, config.data.crop_area = "random_resized", (0.08, 1.0)
    config.data.interpolation = config.data.test_interpolation = "bicubic"
    config.data.image_size = size
    config.data.test_resize = size * 256 // 224
    if size >= 384:
        config.data.test_crop, config.data.test_resize = "square", size
    config.augment.policy, config.augment.erasing = "rand-m9-mstd0.5-inc1", 0.25
    config.loss.label_smoothing = 0.1
    config.optimizer.schedule, config.optimizer.count_from = "cosine", 0
    config.evaluate_every, config.checkpoint.every = 5000, 2000
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
    config.optimizer.update(
        dict(name="sgd", beta1=0.9, weight_decay=0.0, clip_norm=1.0, schedule="cosine")
    )
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
        config.data.flip = task.flip
        if not task.crop:
            config.data.crop, config.data.crop_resize = "none", None
    config.evaluate_every = config.checkpoint.every = min(500, row.steps)
    return config


class HyperRule(NamedTuple):
    """BiT-HyperRule's values for the number of training images (1912.11370, section 3.3)."""

    steps: int
    warmup: int
    stairs: tuple[int, ...]  # Steps after which the rate is a tenth.
    mixup: float


def hyperrule(images: int) -> HyperRule:
    """BiT-HyperRule for so many training images, as in google-research/big_transfer's
    `bit_hyperrule.py`.

    The paper has a tenth of the rate after 30, 60 and 90 % of all schedules; of the short one the
    code has it after 40, 60 and 80 %.
    """
    if images < 20_000:
        return HyperRule(500, 100, (200, 300, 400), 0.0)
    if images < 500_000:
        return HyperRule(10_000, 500, (3000, 6000, 9000), 0.1)
    return HyperRule(20_000, 500, (6000, 12_000, 18_000), 0.1)


# Training images of `TRANSFER`'s sets, and the side of those that are small; all sets are VTAB-1k's
# else.
_IMAGES = {
    "imagenet2012": (IMAGENET_IMAGES, 224),
    "cifar100": (50_000, 32),
    "cifar10": (50_000, 32),
    "oxford_iiit_pet": (3680, 224),
    "oxford_flowers102": (1020, 224),
    **{f"vtab/{name}": (1000, 224) for name in TASKS},
    **{f"vtab/{name}": (1000, 64) for name in ("eurosat", "dspr-loc", "dspr-ori")},
    **{f"vtab/{name}": (1000, 32) for name in ("cifar-100", "svhn")},
}


def bit_hyperrule(
    dataset: str, model: str = "", images: int = 0, side: int = 0, size: int = 0
) -> ConfigDict:
    """Fine-tuning by BiT-HyperRule: SGD at 0.003, batch 512, schedule and mixup by the number of
    images.

    Args:
      dataset: as of `finetune`.
      model: the model's name; empty takes the checkpoint's.
      images: number of training images; 0: as known of the data set.
      side: of the images in pixels, the root of height times width; 0: as known, or 96 and above.
      size: that the model sees; 0: 128 where the side is below 96, else 384, or 480 of R152x4.

    Raises:
      UserError: no such data set; a folder without the number of its images.
    """
    config = finetune(dataset, model)
    known = _IMAGES.get(dataset, (0, 224))
    images, side = images or known[0], side or known[1]
    if images < 1:
        raise UserError(
            f"BiT-HyperRule needs the number of training images: dataset={dataset},images=4000"
        )
    rule = hyperrule(images)
    size = size or (128 if side < 96 else 480 if model == "BiT-R152x4" else 384)
    config.steps = rule.steps
    config.data.image_size = config.data.test_resize = size
    if config.data.crop != "none":
        config.data.crop_resize = {128: 160, 480: 512}.get(size, round(size * 448 / 384))
    config.augment.mixup = rule.mixup
    config.optimizer.update(
        dict(schedule="stairs", warmup_steps=rule.warmup, count_from=0, clip_norm=0.0)
    )
    config.optimizer.stairs = tuple(step / rule.steps for step in rule.stairs)
    config.optimizer.learning_rate = 0.003
    config.sweep.rates, config.sweep.resnet_rates = (0.003,), ()
    config.evaluate_every = config.checkpoint.every = min(500, rule.steps)
    return config
