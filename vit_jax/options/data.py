"""Options of the sections `data` and `augment`: images, their crops and their augmentation."""

import re
from typing import Any

from vit_jax.options.objective import only_with_objective
from vit_jax.options.option import only_with, option, options, unless
from vit_jax.options.rules import (
    SHARE,
    SPLIT,
    Rule,
    either,
    flag,
    number,
    one_of,
    several,
    text,
    whole,
)

SPLIT_KEYS = "train_split", "dev_split", "test_split"
SOURCES_WITHOUT_PATH = ("digits", "handed_in", "mixture", "synthetic")
INTERPOLATIONS = ("bilinear", "bilinear_antialias", "bicubic", "lanczos", "area")
BACKGROUNDS = {"white": 255, "black": 0, "grey": 128, "none": None}
CROPS = ("inception", "random_resized", "square", "short_side", "simple_random", "scale_jitter")
CROPS += ("large_scale_jitter", "none")
JITTERED_CROPS = ("scale_jitter", "large_scale_jitter")
TEST_CROPS = ("short_side", "square", "fit")
PHOTOMETRIC = ("mmsegmentation", "dinov3", "eomt")
BORDER = 4  # Number of pixels by which the crop `simple_random` pads each side.

# AugReg's levels (Steiner et al., 2021): number of operations and magnitude of RandAugment, and
# alpha of mixup.
LEVELS = {
    "none": (0, 0, 0.0),
    # With magnitude 0, some operations still change images: they invert, posterize or remove
    # colour.
    "light1": (2, 0, 0.0),
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5),
    "strong2": (2, 20, 0.8),
}


def _no_slice(config: Any) -> str:
    slices = any("[" in (getattr(config.data, key) or "") for key in SPLIT_KEYS)
    return unless(slices, "a split that is a slice, such as data.train_split='train[:90%]'")


def _no_path(config: Any) -> str:
    source = config.data.source
    return unless(
        source not in SOURCES_WITHOUT_PATH, f"a data.source with a path, and it is {source!r}"
    )


def _no_jittered_mask(config: Any) -> str:
    jittered = only_with("data.crop", *JITTERED_CROPS)
    return only_with_objective("segmentation")(config) or jittered(config)


def parse_rand_policy(policy: str) -> dict[str, Any] | None:
    """Parses timm's notation of a RandAugment, such as `rand-m9-mstd0.5-inc1`.

    The parts may be in any order, each at most once: `m` magnitude from 0 to 10 (default 10); `n`
    number of operations (2); `p` probability of each operation (0.5); `mstd` std of the magnitude
    (0); `inc1` makes operations stronger as the magnitude grows.

    Returns:
      Arguments of `RandPolicy`; None if the text is not in this notation.
    """
    kind, *parts = policy.split("-")
    patterns = dict(
        magnitude=r"m(\d|10)",
        layers=r"n([1-9]\d?)",
        probability=r"p(0(?:\.\d+)?|1(?:\.0+)?)",
        deviation=r"mstd(\d?\d(?:\.\d+)?|100)",
        increasing=r"inc([01])",
    )
    convert = dict(layers=int, increasing=lambda digit: digit == "1")
    values = {}
    for name, pattern in patterns.items():
        found = [match[1] for part in parts if (match := re.fullmatch(pattern, part))]
        if found:
            values[name] = convert.get(name, float)(found[0])
    return values if kind == "rand" and len(values) == len(parts) else None


@options
class DataOptions:
    """Images: source, splits, decoding and crops"""

    source: str = option(
        "digits",
        text(r"\w+"),
        "Kind of data: digits, folder, tfds or another of vit_jax/data/sources.",
    )
    path: str = option(
        "",
        text(),
        "Path of a folder or CSV, TFDS's `name` or `name:data_dir`, or a pattern of file names.",
        requires=_no_path,
    )
    parts: tuple[str, ...] | None = option(
        None,
        several(text()),
        "Parts of a mixture: ('tfds:imagenet2012', 'folder:/data/pets').",
        requires=only_with("data.source", "mixture"),
    )
    weights: tuple[float, ...] | None = option(
        None,
        several(number(above=0)),
        "Sampling weights of a mixture's parts; None: proportional to their numbers of images.",
        requires=only_with("data.source", "mixture"),
    )
    train_split: str = option("train", SPLIT, "Training images.")
    dev_split: str | None = option(
        None,
        SPLIT,
        "Images for evaluation and model selection during training; None: the test images.",
    )
    test_split: str = option(
        "test", SPLIT, "Test images; with a dev_split they are evaluated at the end only."
    )
    slices: str = option(
        "stratified",
        one_of("stratified", "in_order", "hashed"),
        "How train[:90%] is taken: stratified by class, in the source's order, or by hashes of the "
        "paths, so that images keep their slice when others are added.",
        requires=_no_slice,
    )
    groups: str | None = option(
        None,
        text(),
        "Keeps images of one group in the same slice: a regular expression on the path, or a CSV "
        "column.",
        requires=_no_slice,
    )
    label_key: str = option(
        "label",
        text(),
        "TFDS feature or CSV column with the label or labels.",
        requires=only_with("data.source", "csv", "tfds", "array_record", "mixture", "handed_in"),
    )
    caption_key: str = option(
        "caption",
        text(),
        "CSV column, JSON key or TFDS feature with the caption or captions of an image.",
        requires=only_with_objective("contrastive"),
    )
    depth_scale: float = option(
        0.001,
        number(above=0, most=1e3),
        "Metres of a unit of 16-bit depth maps: 0.001 for millimetres, 1/256 for KITTI.",
        requires=only_with("data.source", "depth"),
    )
    classes: tuple[str | int, ...] | None = option(
        None,
        several(either(text(), whole(0)), least=1),
        "Uses images of these classes only; None: all.",
    )
    num_classes: int | None = option(
        None, whole(1, 2**24), "Width of the head; None: the number of classes in the data."
    )
    balance: str = option(
        "none",
        one_of("none", "sqrt", "full"),
        "Class balance of sampled training images: as in the data, by the square root of class "
        "counts, or uniform.",
        validate=lambda value, config: unless(
            value == "none" or config.data.weights is None,
            "'none' with data.weights, which are weights of parts and not of classes",
        ),
        requires=only_with_objective("classification", "distillation"),
    )
    image_size: int = option(224, whole(1, 2**14), "Height and width in pixels.")
    crop: str = option(
        "inception",
        one_of(*CROPS),
        "Training crop: TensorFlow's (inception), torchvision's (random_resized), a random "
        "square after a resize (square, short_side), DeiT III's (simple_random), "
        "mmsegmentation's or detectron2's of a resized and padded image (scale_jitter, "
        "large_scale_jitter), or the whole image.",
        validate=lambda value, config: unless(
            value != "simple_random" or config.data.image_size > 2 * BORDER,
            f"another for data.image_size of {2 * BORDER} or less, which its padding of {BORDER} "
            "would fill",
        ),
    )
    crop_area: tuple[float, ...] = option(
        (0.05, 1.0),
        several(number(above=0, most=1), count=2, ascending=True),
        "Range of the crop's share of the image's area.",
        requires=only_with("data.crop", "inception", "random_resized"),
    )
    crop_aspect: tuple[float, ...] = option(
        (3 / 4, 4 / 3),
        several(number(above=0, most=1e3), count=2, ascending=True),
        "Range of the crop's width over its height.",
        requires=only_with("data.crop", "inception", "random_resized"),
    )
    crop_resize: int | None = option(
        None,
        whole(1, 2**15),
        "Size before the crops square and short_side, such as 448 for crops of 384.",
        validate=lambda value, config: unless(
            config.data.crop not in ("square", "short_side")
            or (value or 0) >= config.data.image_size,
            f"at least data.image_size = {config.data.image_size} for the crop "
            f"{config.data.crop!r}",
        ),
        requires=only_with("data.crop", "square", "short_side"),
    )
    crop_scale: tuple[float, ...] = option(
        (0.5, 2.0),
        several(number(above=0, most=100), count=2, ascending=True),
        "Range of the short side (scale_jitter) or of the long side (large_scale_jitter) after the "
        "resize, as a factor of the crop.",
        requires=only_with("data.crop", *JITTERED_CROPS),
    )
    cat_max_ratio: float = option(
        1.0,
        number(above=0, most=1),
        "Segmentation: a training crop with one class alone, or in which a class has this share or "
        "more of the labelled pixels, is drawn again, up to ten times (mmsegmentation); 1: off.",
        requires=_no_jittered_mask,
    )
    flip: bool = option(True, flag(), "Flips training images horizontally with probability 0.5.")
    test_crop: str = option(
        "short_side",
        one_of(*TEST_CROPS),
        "Resize before the central crop in evaluation: of the short side, or of both sides; fit: "
        "the whole image within the size, padded.",
    )
    test_resize: int = option(
        256,
        whole(1, 2**15),
        "Size before the central crop in evaluation.",
        validate=lambda value, config: unless(
            value >= config.data.image_size, f"at least data.image_size = {config.data.image_size}"
        ),
    )
    interpolation: str | None = option(
        None,
        one_of(*INTERPOLATIONS),
        "Interpolation of crops: TensorFlow's bilinear, Pillow's filters, OpenCV's area; None: the "
        "checkpoint's if training starts from one, else bilinear.",
        validate=lambda value, config: unless(
            config.augment.policy is None or value not in ("lanczos", "area"),
            "bilinear, bilinear_antialias or bicubic with augment.policy, which rotates and "
            "shears by it",
        ),
    )
    test_interpolation: str | None = option(
        None, one_of(*INTERPOLATIONS), "Interpolation in evaluation; None: data.interpolation."
    )
    background: str = option(
        "white",
        one_of(*BACKGROUNDS),
        "Background of transparent images; none: the colours below the alpha channel.",
    )
    decode: str = option(
        "fast",
        one_of("fast", "exact"),
        "JPEG decoding: only the cropped rectangle, or the whole image by Pillow.",
    )
    repeats: int = option(
        1,
        whole(1, 2**10),
        "Repeated augmentation: consecutive uses of an image, each with its own augmentation; an "
        "epoch has fewer images accordingly.",
        validate=lambda value, config: unless(
            value == 1 or 2 * value <= config.batch_size,
            f"at most half of batch_size = {config.batch_size}: images are mixed with others of "
            "their batch",
        ),
    )
    workers: int | None = option(
        None,
        whole(0, 1024),
        "Decoding processes on each host; 0: the training process; None: chosen from cores and "
        "images.",
        operational=True,
    )
    threads: int | None = option(
        None,
        whole(1, 1024),
        "Threads of each decoding process; None: chosen from the number of cores.",
        operational=True,
    )
    max_unreadable: int = option(
        100,
        whole(0),
        "Number of unreadable images that are skipped before the run fails.",
        operational=True,
    )
    changed: str = option(
        "refused",
        one_of("refused", "accepted"),
        "Whether a run resumes after its data have changed; its number of steps stays the same.",
        operational=True,
    )


@options
class AugmentOptions:
    """Augmentation of training images"""

    level: str = option("none", one_of(*LEVELS), "AugReg's level of RandAugment and mixup.")
    randaugment: tuple[float, ...] | None = option(
        None,
        several(
            number(least=0, most=100), count=2, words="2 numbers from 0 to 100, such as (2, 15)"
        ),
        "Layers and magnitude of RandAugment; None: the values of augment.level.",
    )
    policy: str | None = option(
        None,
        Rule(
            str,
            "timm's RandAugment, such as 'rand-m9-mstd0.5-inc1': m of 0 to 10 (whole), n of 1 to "
            "99, p from 0 to 1, mstd from 0 to 100, inc 0 or 1",
            lambda x: isinstance(x, str) and parse_rand_policy(x) is not None,
        ),
        "timm's RandAugment instead of AugReg's, in timm's notation; None: off.",
        validate=lambda value, config: unless(
            value is None
            or (config.augment.level == "none" and config.augment.randaugment is None),
            "None with AugReg's augment.level or augment.randaugment: both are a RandAugment",
        ),
    )
    three_augment: float | None = option(
        None,
        number(least=0, most=100),
        "DeiT III's 3-Augment: grayscale, solarization or blur, then colour jitter of this "
        "strength; None: off.",
        validate=lambda value, config: unless(
            value is None or not _has_other_augmentation(config.augment),
            "None with augment.policy, augment.level, augment.randaugment or augment.color_jitter: "
            "3-Augment replaces them",
        ),
    )
    photometric: str | None = option(
        None,
        one_of(*PHOTOMETRIC),
        "Photometric distortion of segmentation, brightness, contrast, saturation and hue: "
        "mmsegmentation's, DINOv3's or EoMT's; None: off.",
        validate=lambda value, config: unless(
            value is None
            or (
                config.augment.three_augment is None and not _has_other_augmentation(config.augment)
            ),
            "None with augment.policy, augment.level, augment.randaugment, augment.three_augment "
            "or augment.color_jitter: it replaces them",
        ),
    )
    color_jitter: tuple[float, ...] = option(
        (0.0, 0.0, 0.0),
        several(number(least=0, most=100), count=3, words="3 numbers from 0 to 100"),
        "Strength x of brightness, contrast and saturation jitter: a factor in 1 +- x.",
    )
    mixup: float | None = option(
        None, number(least=0, most=1e3), "Alpha of mixup; 0: off; None: the value of augment.level."
    )
    cutmix: float = option(0.0, number(least=0, most=1e3), "Alpha of CutMix; 0: off.")
    cutmix_share: float = option(
        0.5,
        SHARE,
        "Share of batches with CutMix if mixup is on, too.",
        requires=only_with("augment.cutmix"),
    )
    erasing: float = option(0.0, SHARE, "Probability of random erasing.")


def _has_other_augmentation(augment: Any) -> bool:
    return bool(
        augment.policy is not None
        or augment.randaugment is not None
        or augment.level != "none"
        or any(augment.color_jitter)
    )
