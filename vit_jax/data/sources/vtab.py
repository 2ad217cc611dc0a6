"""VTAB-1k: 19 tasks of 1,000 training images (Zhai et al., 1910.04867; the paper, section 4.1).

The score is the mean of the 19 test accuracies. A task consists of a TFDS data set, a rule that
computes the label, and these splits:

    train800        the first 800 images of the training part, for the hyper-parameter search
    val200          the first 200 images of the validation part, for the hyper-parameter search
    train800val200  the images of train800 and val200, for the final training
    test            the whole test part

If a data set has no official validation part, a part of the training images replaces it.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from vit_jax.data.decode import Unreadable, decode
from vit_jax.data.sources.array_record import Records, image_and_labels
from vit_jax.data.sources.base import Example
from vit_jax.data.sources.kind import SourceKind
from vit_jax.data.sources.slices import split_range
from vit_jax.data.sources.tfds import tfds_builder, tfds_feature, tfds_shards, tfds_split
from vit_jax.errors import UserError, nearest

GROUPS = ("natural", "specialized", "structured")
SPLITS = {
    "train800": ("train",),
    "val200": ("val",),
    "train800val200": ("train", "val"),
    "test": ("test",),
}
IMAGES = {"train": 800, "val": 200, "test": None}

# Boundaries of distance classes. The class is the index of the last boundary below the distance.
CLEVR_EDGES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
KITTI_EDGES = (-100.0, 8.0, 20.0, 999.0)  # In metres.


class VtabTask(NamedTuple):
    """One of the 19 tasks.

    Attributes:
      name: name of the task in the paper's table 9.
      dataset: TFDS data set, with the version that the benchmark uses.
      classes: number of classes.
      label: name of the feature with the label, or a function from a record's features to the
        class.
      train, val, test: the training, validation and test part, as slices of TFDS's splits.
      flip, crop: training uses random flips or random crops, as in BiT and the paper. False for
        tasks whose class could change by a flip or a crop.
      image: converts the stored image to the model's input pixels; None: not needed.
    """

    name: str
    group: str
    dataset: str
    classes: int
    label: str | Callable[[Mapping], int] = "label"
    train: str = "train"
    val: str = "validation"
    test: str = "test"
    flip: bool = True
    crop: bool = True
    image: Callable[[bytes], bytes | np.ndarray] | None = None


def clevr_count(features: Mapping) -> int:
    """Returns the number of objects, 3 to 10, as a class from 0 to 7."""
    return len(features["objects/size"].int64_list.value) - 3


def clevr_distance(features: Mapping) -> int:
    """Returns the class of the closest object's distance; `CLEVR_EDGES` separates the classes.

    The distance of an object is the third component of its `pixel_coords`.
    """
    distances = features["objects/pixel_coords"].float_list.value[2::3]
    return bisect_left(CLEVR_EDGES, min(distances, default=math.inf)) - 1


def kitti_distance(features: Mapping) -> int:
    """Returns the class of the distance of the nearest car, van or truck.

    `KITTI_EDGES` separates the classes. An image without such a vehicle has the last class.
    """
    kinds = features["objects/type"].int64_list.value
    distances = features["objects/location"].float_list.value[2::3]
    distances = [distance for kind, distance in zip(kinds, distances, strict=True) if kind < 3]
    return bisect_left(KITTI_EDGES, min(distances, default=1000.0)) - 1


def dsprites_position(features: Mapping) -> int:
    """Returns the class of the horizontal position: 32 positions, two per class."""
    return features["label_x_position"].int64_list.value[0] // 2


def dsprites_orientation(features: Mapping) -> int:
    """Returns the class of the orientation: 40 angles in 16 classes."""
    return int(features["label_orientation"].int64_list.value[0] / 2.5)


def black_and_white(image: bytes) -> bytes | np.ndarray:
    """Converts the pixels of dSprites, 0 and 1, to RGB pixels of 0 and 255."""
    try:
        return decode(image) * np.uint8(255)
    except Unreadable:
        return image  # The pipeline cannot decode the image either, and counts it as unreadable.


NINE_TENTHS = dict(train="train[:90%]", val="train[90%:]")
FOUR_FIFTHS = dict(train="train[:80%]", val="train[80%:]")
THREE_FIFTHS = dict(train="train[:60%]", val="train[60%:80%]", test="train[80%:]")
CLEVR = dict(dataset="clevr:3.*.*", **NINE_TENTHS, test="validation", crop=False)
DSPRITES = dict(dataset="dsprites:2.*.*", train="train[:80%]", val="train[80%:90%]")
DSPRITES |= dict(test="train[90%:]", flip=False, image=black_and_white)
SMALLNORB = dict(dataset="smallnorb:2.*.*", val="test[:50%]", test="test[50%:]")

_ALL = (
    VtabTask("Caltech101", "natural", "caltech101:3.*.*", 102, **NINE_TENTHS),
    VtabTask("CIFAR-100", "natural", "cifar100:3.*.*", 100, **NINE_TENTHS),
    VtabTask("DTD", "natural", "dtd:3.*.*", 47),
    VtabTask("Flowers102", "natural", "oxford_flowers102:2.*.*", 102),
    # The benchmark uses version 3.*.* of the data set. TFDS can read this version, but no longer
    # prepares it. Version 4.0.0 fixes damaged images.
    VtabTask("Pets", "natural", "oxford_iiit_pet:*.*.*", 37, **FOUR_FIFTHS),
    VtabTask("Sun397", "natural", "sun397/tfds:4.*.*", 397),
    VtabTask("SVHN", "natural", "svhn_cropped:3.*.*", 10, **NINE_TENTHS),
    VtabTask("Camelyon", "specialized", "patch_camelyon:2.*.*", 2),
    VtabTask("EuroSAT", "specialized", "eurosat/rgb:2.*.*", 10, **THREE_FIFTHS),
    VtabTask("Resisc45", "specialized", "resisc45:3.*.*", 45, **THREE_FIFTHS),
    VtabTask("Retinopathy", "specialized", "diabetic_retinopathy_detection/btgraham-300:3.*.*", 5),
    VtabTask("Clevr-Count", "structured", classes=8, label=clevr_count, **CLEVR),
    VtabTask("Clevr-Dist", "structured", classes=6, label=clevr_distance, **CLEVR),
    VtabTask("DMLab", "structured", "dmlab:2.0.1", 6, crop=False),
    VtabTask("dSpr-Loc", "structured", classes=16, label=dsprites_position, crop=False, **DSPRITES),
    VtabTask("dSpr-Ori", "structured", classes=16, label=dsprites_orientation, **DSPRITES),
    # The benchmark uses version 3.1.0 of the data set. TFDS can read this version, but no longer
    # prepares it. Version 3.3.0 adds a label for occlusion.
    VtabTask("KITTI-Dist", "structured", "kitti:3.*.*", 4, kitti_distance, crop=False),
    VtabTask(
        "sNORB-Azim", "structured", classes=18, label="label_azimuth", flip=False, **SMALLNORB
    ),
    VtabTask("sNORB-Elev", "structured", classes=9, label="label_elevation", **SMALLNORB),
)
TASKS = {task.name.lower(): task for task in _ALL}


def open_task(path: str, split: str) -> Records:
    """Opens a split of a task.

    Args:
      path: `clevr-count`, or `clevr-count:data_dir`.
      split: one of `SPLITS`.

    Raises:
      UserError: the task or split does not exist, the data set is not prepared, or its number of
        classes is wrong.
    """
    name, _, data_dir = path.partition(":")
    if name not in TASKS:
        raise UserError(f"VTAB has no task {name!r} (data.path); {nearest(name, TASKS)}")
    task = TASKS[name]
    builder = tfds_builder(f"{task.dataset}:{data_dir}" if data_dir else task.dataset)
    names = tuple(map(str, range(task.classes)))
    if isinstance(task.label, str):
        names = tuple(tfds_feature(builder, task.label).names)
        if len(names) != task.classes:
            raise UserError(
                f"data set {builder.info.full_name!r} has {len(names)} classes, VTAB's {task.name} "
                f"{task.classes}: it is another data set"
            )
    sizes = {name: part.num_examples for name, part in builder.info.splits.items()}
    slices = tfds_slices(task, split, sizes)
    records, shards = tfds_split(builder, slices), tfds_shards(builder, slices)
    title, reader = f"{task.name} {split}", partial(read, task.name.lower())
    return Records(title, records, reader, names, 1, shards=shards)


def tfds_slices(task: VtabTask, split: str, sizes: Mapping[str, int]) -> str:
    """Returns a task's split in TFDS's notation, such as `train[0:800]+train[2753:2953]`.

    Args:
      split: split of the task, such as `train800val200`.
      sizes: number of images in each TFDS split.
    """
    if split not in SPLITS:
        raise UserError(f"VTAB has no split {split!r}; there are: {', '.join(SPLITS)}")
    slices = []
    for part in SPLITS[split]:
        whole = getattr(task, part)  # A TFDS split or a slice, such as train[:90%].
        name = whole.split("[")[0]
        if name not in sizes:
            raise UserError(
                f"data set {task.dataset!r} has no split {name!r}; there are: {', '.join(sizes)}"
            )
        images = split_range(whole, sizes[name])
        count = IMAGES[part] or len(images)
        if count > len(images):
            raise UserError(
                f"VTAB takes {count} images of {whole} of {task.dataset!r}, which has {len(images)}"
            )
        slices.append(f"{name}[{images.start}:{images.start + count}]")
    return "+".join(slices)


def read(name: str, features: Mapping) -> Example:
    """Converts a record's features to an example of the task `name`."""
    task = TASKS[name]
    if isinstance(task.label, str):
        return image_and_labels(features, task.label)
    (image,) = features["image"].bytes_list.value
    return Example(task.image(image) if task.image else image, (task.label(features),))


VTAB = SourceKind(
    "vtab",
    "a task of VTAB-1k",
    lambda split, options: open_task(options.path, split),
    path="TASK or TASK:DATA_DIR",
    reads_slices=True,
    stands_alone=False,  # The splits of VTAB tasks are not named train and test.
)
