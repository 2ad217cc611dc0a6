"""Training recipes for the config files: the recipes of the ViT paper and of later papers.

The recipes are those of ViT (tables 3 and 4 of the paper), BiT, MAE, EVA, BEiT, DINO, SigLIP, DeiT
and others.

Learning rates are as in the papers. The schedules of the ViT paper's recipes and of BiT's
pre-training are shifted by one update, compared with the authors' code: they count updates from 1,
vit_jax's default. All other recipes set optimizer.count_from=0, as in vision_transformer,
big_vision and PyTorch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import base_config
from vit_jax.data.sources.vtab import TASKS
from vit_jax.errors import UserError, nearest
from vit_jax.published.weights import all_weights

IMAGENET_IMAGES = 1_281_167  # Number of training images.
IMAGENET_21K_IMAGES = 14_197_122  # Number of images of the fall 2011 release, 21,841 classes.


def pretraining(model: str) -> ConfigDict:
    """Returns the values common to all pre-training runs of the ViT paper (section 4.1).

    The values that differ between runs are in table 3.
    """
    config = base_config()
    config.model.name = model
    config.model.head_bias = 0.0
    config.model.dtype = "bfloat16"
    config.batch_size = 4096
    config.data.source = "tfds"
    config.data.image_size, config.data.test_resize = 224, 256
    # TensorFlow's default bounds of a crop's aspect ratio (1.33, not 4/3).
    config.data.crop_aspect = (0.75, 1.33)
    # As in big_vision.
    config.data.interpolation, config.data.test_interpolation = "bilinear", "area"
    config.loss.name = "sigmoid"
    config.optimizer.schedule, config.optimizer.end_learning_rate = "linear", 1e-5
    config.optimizer.warmup_steps = 10_000
    config.optimizer.clip_norm = 1.0
    config.evaluate_every = 5000
    config.checkpoint.every = 2000
    return config


def bit_pretraining(model: str) -> ConfigDict:
    """Returns the config of BiT's own pre-training, with SGD (1912.11370, section 3.2)."""
    config = pretraining(model)
    config.optimizer.update(dict(name="sgd", beta1=0.9, schedule="stairs", end_learning_rate=0.0))
    config.optimizer.update(dict(warmup_steps=5000, clip_norm=0.0))
    config.optimizer.learning_rate = 0.03 * config.batch_size / 256
    config.optimizer.weight_decay, config.optimizer.coupled_decay = 1e-4, True
    return config


def masked_autoencoder(model: str) -> ConfigDict:
    """Returns the values common to MAE's (2111.06377) pre-training and fine-tuning."""
    config = base_config()
    config.model.update(dict(name=model, position="sincos2d_mae", gelu="erf", dtype="bfloat16"))
    config.data.source, config.data.path = "tfds", "imagenet2012"
    config.data.train_split, config.data.test_split = "train", "validation"
    config.data.image_size, config.data.test_resize = 224, 256
    config.data.crop, config.data.interpolation = "random_resized", "bicubic"
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    config.optimizer.update(dict(weight_decay=0.05, clip_norm=0.0, count_from=0))
    config.evaluate_every, config.checkpoint.every = 5000, 2000
    return config


class Masked(NamedTuple):
    """A pre-training recipe of EVA, EVA-02 or BEiT."""

    epochs: int  # Number of epochs.
    batch: int  # Batch size.
    learning_rate: float  # The peak learning rate.
    warmup: int  # Epochs of warm-up.
    stochastic_depth: float  # The highest rate of stochastic depth.


def masked_features(model: str, row: Masked, teacher: str) -> ConfigDict:
    """Returns a config with the values that are common to the pre-training of EVA and EVA-02.

    The training images are ImageNet-21k; its labels are not used.
    """
    config = _like_eva(model, row, IMAGENET_21K_IMAGES)
    # The model's name implies that its norm is after the pooling, as in fine-tuning. In
    # pre-training the norm is before the pooling, as set here.
    config.model.update(
        dict(pooling="gap", cls_token=True, fc_norm=False, stochastic_depth=row.stochastic_depth)
    )
    # CLIP's mean and std. Fine-tuning uses the checkpoint's mean and std.
    config.model.mean = (0.48145466, 0.4578275, 0.40821073)
    config.model.std = (0.26862954, 0.26130258, 0.27577711)
    config.objective.update(dict(name="eva", teacher=teacher, teacher_features="head"))
    config.objective.teacher_dtype = "bfloat16"
    config.data.path = "imagenet21k"
    config.data.train_split, config.data.test_split = "train[51200:]", "train[:25600]"
    config.data.image_size, config.data.test_resize, config.data.crop_area = 224, 256, (0.2, 1.0)
    # The warm-up starts at 0, because the authors' code ignores its flag --warmup_lr.
    config.optimizer.end_learning_rate = 1e-5
    config.optimizer.beta2, config.optimizer.epsilon, config.optimizer.clip_norm = 0.98, 1e-6, 3.0
    return config


class Tuned(NamedTuple):
    """A fine-tuning recipe of EVA, EVA-02 or BEiT."""

    size: int  # Image size in pixels.
    epochs: int  # Number of epochs.
    batch: int  # Batch size.
    learning_rate: float  # The peak learning rate.
    warmup: int  # Epochs of warm-up.
    layer_decay: float  # Layer-wise decay of the learning rate.
    stochastic_depth: float  # The highest rate of stochastic depth.
    smoothing: float  # Label smoothing.
    least_area: float = 0.08  # The minimum area of a crop, relative to the image.


def tuned_features(model: str, row: Tuned, i21k: bool) -> ConfigDict:
    """Returns EVA's and EVA-02's fine-tuning values; on ImageNet-1k an average is evaluated."""
    config = _like_eva(model, row, IMAGENET_21K_IMAGES if i21k else IMAGENET_IMAGES)
    config.model.update(
        dict(pooling="gap", cls_token=True, fc_norm=True, stochastic_depth=row.stochastic_depth)
    )
    config.data.path = "imagenet2012"
    config.data.train_split, config.data.test_split = "train", "validation"
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
    """Returns the config of BEiT's pre-training on ImageNet-21k or 1k. The tokenizer is not set."""
    config = _like_eva(model, row, IMAGENET_21K_IMAGES if i21k else IMAGENET_IMAGES)
    # The model's name implies that its norm is after the pooling and that each layer has position
    # biases, as in fine-tuning. The values set here change both for pre-training.
    config.model.update(dict(pooling="gap", cls_token=True, fc_norm=False, position_at="shared"))
    config.model.update(dict(initialization="beit", stochastic_depth=row.stochastic_depth))
    config.objective.name = "beit"
    config.data.path = "imagenet2012"
    config.data.train_split, config.data.test_split = "train", "validation"
    if i21k:
        config.data.path, config.data.train_split = "imagenet21k", "train[51200:]"
        config.data.test_split = "train[:25600]"
    else:
        config.model.mean, config.model.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    config.data.image_size, config.data.test_resize, config.data.crop_area = 224, 256, (0.08, 1.0)
    config.augment.color_jitter = (0.4, 0.4, 0.4)  # The same for the tokenizer's image.
    # The warm-up starts at 0, because the authors' code ignores its flag --warmup_lr.
    config.optimizer.end_learning_rate = 1e-5
    config.optimizer.clip_norm = 3.0
    return config


def tuned_codes(
    model: str, row: Tuned, i21k: bool, mixed: bool, weight_decay: float, clip: float
) -> ConfigDict:
    """Returns the values of BEiT's fine-tuning on ImageNet-1k or 21k.

    Args:
      clip: maximum norm of the gradient; 0: no clipping.
    """
    config = tuned_features(model, row, i21k)
    # In pre-training, all layers share one table of relative position biases. In fine-tuning, each
    # layer has a table of its own, which is initialized from the shared table.
    config.model.position_at = "stem"
    config.augment.erasing = 0.25
    if mixed:
        config.augment.mixup, config.augment.cutmix = 0.8, 1.0
    config.data.test_resize = row.size if row.size >= 384 else row.size * 256 // 224
    config.optimizer.update(
        dict(average=0.0, average_from="zero", weight_decay=weight_decay, clip_norm=clip)
    )
    config.optimizer.end_learning_rate = 1e-6
    return config


def _like_eva(model: str, row: Masked | Tuned, images: int) -> ConfigDict:
    """Returns the values common to EVA, EVA-02 and BEiT, in pre-training and fine-tuning."""
    config = base_config()
    config.model.name, config.model.dtype = model, "bfloat16"
    config.epochs, config.batch_size = float(row.epochs), row.batch
    config.data.source = "tfds"
    config.data.crop, config.data.interpolation = "random_resized", "bicubic"
    config.optimizer.learning_rate = row.learning_rate
    config.optimizer.weight_decay, config.optimizer.decay = 0.05, "tables"
    config.optimizer.warmup_steps = round(row.warmup * images / row.batch)
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 0.0
    config.optimizer.count_from = 0
    config.evaluate_every, config.checkpoint.every = 5000, 2000
    return config


class TeacherRecipe(NamedTuple):
    """Schedules of self-distillation. Durations are in epochs of `epoch` steps."""

    epochs: float  # Number of epochs of the run.
    epoch: int  # Number of steps that the authors call an epoch.
    learning_rate: float  # Learning rate at the end of the warm-up.
    warmup: float  # Epochs of the learning rate's warm-up.
    weight_decay: tuple[float, float]  # Weight decay at the start and at the end.
    momentum: float  # The teacher's momentum at the start.
    area: tuple[float, float]  # Minimum and maximum area of large crops, relative to the image.
    # Minimum and maximum area of small crops, relative to the image.
    local_area: tuple[float, float]
    # The teacher's temperature at the start, and after its warm-up.
    temperature: tuple[float, float] = (0.04, 0.04)
    temperature_warmup: float = 0  # Epochs of the warm-up of the teacher's temperature.
    frozen: float = 1  # Epochs with frozen prototypes.
    # Probabilities of blur in the first large view, in the second large view, and in small views.
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)


# DINOv2's short schedule. The recipes for the long schedules start from these values and change
# a few of them.
DINOV2 = TeacherRecipe(
    epochs=100,
    epoch=1250,  # Number of steps that the authors call an epoch.
    learning_rate=4e-3 * (2048 / 1024) ** 0.5,
    warmup=10,
    weight_decay=(0.04, 0.4),
    momentum=0.992,
    area=(0.32, 1.0),
    local_area=(0.05, 0.32),
    temperature=(0.04, 0.07),
    temperature_warmup=30,
    # DINOv2's code applies blur with one minus the probability in its config. The values here are
    # the actual probabilities for the first large crop, the second large crop and the small crops.
    blur=(0.0, 0.9, 0.5),
)


def self_distillation(recipe: TeacherRecipe, batch_size: int, local_size: int = 96) -> ConfigDict:
    """Returns the values common to DINO, DINOv2 and DINOv3: views, colours and optimizer.

    An image has two large crops of 224 pixels and eight small crops. Crops are mirrored at random,
    and get BYOL's colour augmentation (2006.07733, table 6). The optimizer is AdamW. Learning rate,
    weight decay and the teacher's momentum have cosine schedules.
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


def siglip(model: str) -> ConfigDict:
    """Returns the values of SigLIP's runs on images and captions of WebLI (2303.15343)."""
    config = base_config()
    config.model.update(dict(name=model, pooling="map", dtype="bfloat16"))
    config.data.update(dict(source="csv", crop="none", test_crop="square"))
    config.data.update(dict(image_size=224, test_resize=224, flip=False))
    config.objective.name = "contrastive"
    config.batch_size, config.steps = 32768, 9_000_000_000 // 32768
    config.optimizer.update(dict(name="adafactor", beta2=0.95, learning_rate=1e-3))
    config.optimizer.update(dict(weight_decay=1e-4 / 1e-3, clip_norm=1.0, warmup_steps=20_000))
    config.optimizer.update(dict(schedule="cosine", end_learning_rate=0.0, count_from=0))
    config.evaluate_every, config.checkpoint.every = 5000, 1000
    return config


def deit_like(
    model: str, task: str, skipped: Mapping[str, Mapping[str, float]], size: int
) -> ConfigDict:
    """Returns the values common to DeiT, Swin and ConvNeXt: augmentation, cosine schedule.

    Args:
      task: a key of the table `skipped`, such as `finetune`. The task `i21k` is training on
        ImageNet-21k, all other tasks are on ImageNet-1k.
      skipped: rates of stochastic depth, by task and model.
      size: image size. With 384 pixels and more, test images are resized to a square. With a
        smaller size, they are cropped.

    Raises:
      UserError: the task is unknown, or has no recipe for the model.
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
        # ImageNet's mean and std, as in the authors' code. Fine-tuning uses the mean and std of the
        # checkpoint.
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


class Segmented(NamedTuple):
    """A recipe of semantic segmentation.

    Before cropping, one side of the image is resized to a random length: the short side in the
    recipes of DINOv3 and Swin, the long side in EoMT's recipe.
    """

    backbone: str  # The default backbone.
    steps: int  # Number of steps, with 16 images each.
    warmup: int  # Number of steps of the warm-up.
    crop: str  # Kind of training crop, the value of `data.crop`.
    # A crop is drawn again if one class covers more than this share of it (`data.cat_max_ratio`).
    cat_max_ratio: float
    # Photometric distortion of mmsegmentation, DINOv3 or EoMT (`augment.photometric`).
    photometric: str


ADE20K_IMAGES = 20_210  # Number of training images.
SEGMENTATION = {
    "linear": Segmented("DINOv3-B/16", 40_000, 1500, "scale_jitter", 0.75, "dinov3"),
    "eomt": Segmented(
        "DINOv3-B/16", 16 * (ADE20K_IMAGES // 16), 2000, "large_scale_jitter", 1.0, "eomt"
    ),
    "upernet": Segmented("Swin-T", 160_000, 1500, "scale_jitter", 0.75, "mmsegmentation"),
}


def segmentation(head: str, steps: int = 0) -> ConfigDict:
    """Returns the recipe for ADE20K by the authors of a head: DINOv3's, EoMT's or Swin's.

    Args:
      steps: number of steps; 0: the authors' number. The warm-up is changed in proportion.
    """
    row = SEGMENTATION[head]
    steps = steps or row.steps

    def part(count: int) -> int:
        return max(1, round(count * steps / row.steps))

    config = base_config()
    config.objective.name, config.segmentation.head = "segmentation", head
    config.batch_size, config.steps = 16, steps
    config.data.source, config.data.test_split = "masks", "val"
    config.data.image_size = config.data.test_resize = 512
    config.data.crop, config.data.crop_scale, config.data.test_crop = row.crop, (0.5, 2.0), "fit"
    config.data.cat_max_ratio, config.augment.photometric = row.cat_max_ratio, row.photometric
    config.optimizer.count_from, config.optimizer.clip_norm = 0, 0.0
    config.optimizer.warmup_steps = part(row.warmup)
    config.evaluate_every, config.checkpoint.every = part(5000), part(1000)
    if head == "linear":
        config.finetune.train = "head"
        config.optimizer.update(dict(learning_rate=1e-3, weight_decay=1e-3, decay="all"))
        config.optimizer.warmup_learning_rate = 1e-3 * 1e-6
    elif head == "eomt":
        config.model.dtype = "bfloat16"
        config.optimizer.update(dict(learning_rate=2e-4, weight_decay=0.05, decay="all"))
        config.optimizer.update(dict(schedule="polynomial", power=0.9, clip_norm=0.01))
        config.finetune.frozen_steps, config.finetune.warmup_steps = part(2000), part(3000)
        starts, ends = (0, 6520, 9780, 13040), (3000, 9780, 13040, 16300)
        config.segmentation.masked_until = tuple(step / row.steps for step in starts)
        config.segmentation.unmasked_from = tuple(step / row.steps for step in ends)
    else:
        config.model.stochastic_depth = 0.3
        config.optimizer.update(dict(learning_rate=6e-5, weight_decay=0.01, schedule="linear"))
        config.optimizer.warmup_learning_rate = 6e-5 * 1e-6
    return config


# Maps the name of a depth head to its options. `linear` is DINOv3's linear probe. `linear4` is
# DINOv2's linear probe on four layers. `dpt` is DINOv2's DPT head with DINOv3's depth bins.
# (DINOv2's own DPT head has no bins. It predicts the depth directly: `bins=1`.)
DEPTH = {
    "linear": dict(head="linear"),
    "linear4": dict(head="linear", layers=4, class_token=True, normalize=False, upsample=4),
    "dpt": dict(head="dpt", class_token=True, normalize=False, gradient_weight=0.5),
}


def depth(head: str, size: int = 416, steps: int = 0) -> ConfigDict:
    """Returns DINOv3's values for NYU Depth v2, with a frozen backbone.

    This recipe differs from the authors' in two ways. The authors crop 416x544 pixels from images
    of 480x640 pixels, and this recipe crops squares with the whole height of the image. The authors
    also rotate images by up to 2.5 degrees, change gamma and colours, and change beta1 during the
    run; this recipe does not. DINOv2's configs contain the gradient loss, but it has no effect with
    two images on each GPU.

    Args:
      steps: number of steps; 0: the authors' number. The warm-up is changed in proportion.
    """
    recipe_steps = 38_400
    steps = steps or recipe_steps

    def part(count: int) -> int:
        return max(1, round(count * steps / recipe_steps))

    config = base_config()
    config.objective.name = "depth"
    config.depth.update(DEPTH[head])
    config.depth.scale_steps = part(100)
    config.batch_size, config.steps = 16, steps
    config.data.update(dict(source="depth", test_split="val", image_size=size))
    # Predicted depth depends on the apparent size of objects. All images are therefore resized to
    # the same height, the height of the crop.
    config.data.update(dict(test_crop="short_side", test_resize=size))
    config.data.update(dict(crop="scale_jitter", crop_scale=(1.0, 1.0)))
    config.augment.color_jitter = (0.25, 0.0, 0.0)
    config.finetune.train = "head"
    config.optimizer.update(dict(learning_rate=3e-4, beta2=0.99, weight_decay=1e-4, decay="all"))
    config.optimizer.update(dict(warmup_steps=part(12_800), warmup_learning_rate=3e-4 / 1000))
    config.optimizer.update(dict(end_learning_rate=3e-4 / 25 / 1000, count_from=0, clip_norm=35.0))
    config.evaluate_every = config.checkpoint.every = part(1600)
    return config


class Transfer(NamedTuple):
    """A row of the paper's table 4 (fine-tuning), with its learning rates (appendix B.1.1)."""

    path: str  # Name of the TFDS data set; empty: the user's own images.
    steps: int
    warmup: int  # Steps of the warm-up, from the authors' code, because the paper has no number.
    rates: tuple[float, ...]
    held_out: int  # Percentage of the training images held out to compare learning rates.
    test_split: str = "test"


_RATES = (0.001, 0.003, 0.01, 0.03)
TRANSFER = {
    "imagenet2012": Transfer("imagenet2012", 20_000, 500, (0.003, 0.01, 0.03), 1, "validation"),
    "cifar100": Transfer("cifar100", 10_000, 500, _RATES, 2),
    "cifar10": Transfer("cifar10", 10_000, 500, _RATES, 2),
    "oxford_iiit_pet": Transfer("oxford_iiit_pet", 500, 100, _RATES, 10),
    "oxford_flowers102": Transfer("oxford_flowers102", 500, 100, _RATES, 10),
    # The user's own images are trained with the values of the ViT paper's small data sets, such as
    # Oxford-IIIT Pets.
    "folder": Transfer("", 500, 100, _RATES, 10),
}


def finetune(dataset: str, model: str = "", size: int = 384) -> ConfigDict:
    """Returns the paper's fine-tuning recipe (section 4.1, table 4): SGD, batch 512, cosine.

    Args:
      dataset: a key of `TRANSFER`, or `vtab/NAME` for a task of VTAB-1k. All tasks of VTAB-1k have
        the same learning rate.
      model: the model's name in the paper; empty: the checkpoint's model.
      size: image size. For table 2's results on ImageNet it is 512 (L/16) and 518 (H/14).
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
    # As in BiT: with an image size of 384 pixels, training images are resized to a side of 448
    # pixels and cropped to 384. Test images are resized to 384 pixels without cropping.
    config.data.crop, config.data.crop_resize = "square", round(size * 448 / 384)
    config.data.test_crop, config.data.test_resize = "square", size
    config.data.interpolation = None  # The checkpoint's interpolation.
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
    """Values of BiT-HyperRule for a number of training images (1912.11370, section 3.3)."""

    steps: int
    warmup: int
    stairs: tuple[int, ...]  # Steps after which the learning rate is divided by 10.
    mixup: float


def hyperrule(images: int) -> HyperRule:
    """Returns the values of BiT-HyperRule for a number of training images.

    The values are from `bit_hyperrule.py` of google-research/big_transfer. This code differs from
    the paper: in the paper, the learning rate is divided by 10 after 30, 60 and 90 % of the steps;
    in the code's short schedule, after 40, 60 and 80 % of the steps.
    """
    if images < 20_000:
        return HyperRule(500, 100, (200, 300, 400), 0.0)
    if images < 500_000:
        return HyperRule(10_000, 500, (3000, 6000, 9000), 0.1)
    return HyperRule(20_000, 500, (6000, 12_000, 18_000), 0.1)


# Maps a data set to the number of its training images, and to their side in pixels. Sides above 224
# are also listed as 224, because BiT-HyperRule only compares sides with 96. VTAB-1k's data sets
# have 1,000 images.
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
    """Returns the config of BiT-HyperRule: fine-tuning with SGD at learning rate 0.003, batch 512.

    The schedule and mixup depend on the number of images.

    Args:
      dataset: a key of `TRANSFER`, or `vtab/NAME` for a task of VTAB-1k.
      images: number of training images; 0: the number in the data set, if it is known.
      side: side of the images in pixels, the square root of height times width. 0: the data set's
        side if it is known, else at least 96 is assumed.
      size: image size of the model. 0: 128 if the side is below 96, else 480 for R152x4 and 384 for
        other models.

    Raises:
      UserError: the data set is unknown, or it is a folder and `images` is 0.
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


def detection(size: int, window: int = 0, steps: int = 0) -> ConfigDict:
    """Returns a recipe for COCO with a ViTDet backbone and a DETR head.

    Backbone, crops and schedule (100 epochs, batches of 64 images) are those of ViTDet (2203.16527,
    detectron2's `mask_rcnn_vitdet_b_100ep.py`). Losses and gradient clipping are those of
    Deformable DETR (2010.04159).

    Args:
      size: height and width of the images in pixels.
      window: side of the attention windows of a ViT, in patches; 0: all layers attend to all
        patches.
      steps: number of steps; 0: the authors' number.
    """
    config = base_config()
    config.model.update(dict(name="", dtype="bfloat16", stochastic_depth=0.1))
    if window:
        config.model.update(dict(attention="windows", window=window, pooling="gap"))
    config.objective.name = "detection"
    config.data.update(dict(source="coco", train_split="train", test_split="val"))
    config.data.update(dict(image_size=size, test_resize=size, test_crop="fit"))
    config.data.update(dict(crop="large_scale_jitter", crop_scale=(0.1, 2.0)))
    config.batch_size, config.steps = 64, steps or 184_375
    config.optimizer.update(dict(name="adam", learning_rate=1e-4, weight_decay=0.1))
    config.optimizer.update(dict(beta2=0.999, layer_decay=0.7, clip_norm=0.1))
    config.optimizer.update(dict(schedule="stairs", stairs=(163_889 / 184_375, 177_546 / 184_375)))
    config.optimizer.update(dict(warmup_steps=min(250, config.steps // 10), count_from=0))
    config.evaluate_every = config.checkpoint.every = min(2000, config.steps)
    return config


def backbone_values(backbone: str, smoke: bool = False) -> dict[str, Any]:
    """Returns the config values, by dotted key, that set the backbone of a dense head.

    Args:
      backbone: a checkpoint, or the name of a model. If published weights of the model exist,
        training starts from them, else from random parameters.
      smoke: the run is a smoke test. Nothing is downloaded.
    """
    from vit_jax.models import parse_name  # It imports JAX, which would slow down `--help`.

    published = [weights.repository for weights in all_weights() if weights.model == backbone]
    try:
        named = bool(published) or bool(parse_name(backbone))
    except UserError:
        named = False
    if named and (smoke or not published):
        # Some recipes freeze the backbone in the first steps. Without published weights its
        # parameters are random, so it is trained from the first step.
        return {"model.name": backbone, "finetune.frozen_steps": 0, "finetune.warmup_steps": 0}
    checkpoint = f"hf://{published[0]}" if published else backbone
    return {"model.name": "", "finetune.checkpoint": checkpoint}
