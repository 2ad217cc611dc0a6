"""Test sets for ImageNet models: ImageNet's validation images, ImageNet-v2 and ObjectNet.

The validation images are evaluated twice, with the original labels and with ReaL labels. All test
sets are evaluated with top-1 and top-5 accuracy. An image has a set of correct classes among
ImageNet's 1,000 classes. For top-k accuracy, the model is right if one of its k most likely classes
is in this set. Images without a correct class are excluded. This module opens the validation images
and ObjectNet. ImageNet-v2 is an ordinary TFDS data set (`IMAGENET_V2`).
"""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import PurePath

import numpy as np
from etils import epath

from vit_jax.data.class_names import Match, match_classes
from vit_jax.data.decode import Unreadable, decode
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources.array_record import Records, image_and_labels
from vit_jax.data.sources.base import Example, Source
from vit_jax.data.sources.folder import Folder
from vit_jax.data.sources.slices import chosen as chosen_images
from vit_jax.data.sources.tfds import tfds_builder, tfds_feature, tfds_shards, tfds_split
from vit_jax.errors import UserError

CLASSES = 1000
IMAGENET_V2 = "imagenet_v2/matched-frequency"  # Name of the TFDS data set; its split is `test`.

REAL_IMAGES = 50_000
REAL_URL = "https://github.com/google-research/reassessed-imagenet/blob/master/real.json"
VALIDATION_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.\w+")

OBJECTNET_CLASSES = 113  # ImageNet has 113 of ObjectNet's 313 classes.
OBJECTNET_URL = "https://objectnet.dev/download.html"
OBJECTNET_BORDER = 1  # Width in pixels of the red border around each image.

Classes = tuple[int, ...]  # Indices of ImageNet's classes.


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Computes top-1 and top-5 accuracy for images with any number of correct classes.

    Args:
      predictions: the most likely classes in descending order, int `[images, 5]`. With fewer than
        five columns, `top5` is not computed.
      labels: the correct classes of each image, int `[images, most]`, padded with -1.

    Returns:
      A dict with the accuracies `top1` and `top5`, from 0 to 1, and the number of evaluated
      `images`. Images without a correct class are not evaluated.
    """
    right = (predictions[:, :, None] == labels[:, None, :]) & (labels >= 0)[:, None, :]
    right = right.any(axis=-1)[(labels >= 0).any(axis=-1)]
    figures = {
        f"top{k}": float(right[:, :k].any(axis=-1).sum() / max(len(right), 1))
        for k in (1, 5)
        if k <= predictions.shape[1]
    }
    return figures | {"images": len(right)}


def match_head(classes: int, class_names: Sequence[str], checkpoint: str) -> Match:
    """Returns the index of each ImageNet class among a model's classes, matched by name.

    If the checkpoint contains no class names, the classes are assumed to be in ImageNet's order.

    Args:
      class_names: names of these classes; empty: the checkpoint contains no names.

    Raises:
      UserError: the model predicts other classes than ImageNet's.
    """
    if classes != CLASSES:
        raise UserError(
            f"{checkpoint} predicts {classes:,} classes, ImageNet has {CLASSES:,}: fine-tune it "
            "there first"
        )
    if not class_names:
        return Match(np.arange(CLASSES))
    try:
        return match_classes(class_names, synsets(), checkpoint)
    except UserError as error:
        raise UserError(f"{error}: fine-tune it on ImageNet first") from error


@functools.cache
def synsets() -> tuple[str, ...]:
    """Returns the synsets of ImageNet's classes, such as n01440764, in the order of the indices."""
    import tensorflow_datasets as tfds

    return tuple(tfds.builder("imagenet2012", try_gcs=False).info.features["label"].names)


def check_classes(class_names: Sequence[str], name: str) -> None:
    """Raises UserError if a data set's class names are not ImageNet's synsets, in this order."""
    expected = synsets()
    if len(class_names) != len(expected):
        raise UserError(f"{name} has {len(class_names):,} classes, ImageNet {len(expected):,}")
    for number, (class_name, synset) in enumerate(zip(class_names, expected, strict=True)):
        if class_name != synset:
            raise UserError(f"class {number} of {name} is {class_name!r}, in ImageNet {synset!r}")


def read_real(path: str) -> list[Classes]:
    """Reads ReaL's labels (Beyer et al., arXiv 2006.07159).

    Returns:
      A list with the correct classes of each validation image. Item 0 is for validation image 1.

    Raises:
      UserError: the file is missing or does not contain ReaL's labels.
    """
    labels = _read_json(path, list, f"ReaL's labels, which are at {REAL_URL}")
    if len(labels) != REAL_IMAGES:
        raise UserError(
            f"{path} has {len(labels):,} entries, ReaL {REAL_IMAGES:,}; its labels are at "
            f"{REAL_URL}"
        )
    for number, classes in enumerate(labels, 1):
        if not isinstance(classes, list) or not all(
            isinstance(label, int) and 0 <= label < CLASSES for label in classes
        ):
            raise UserError(
                f"entry {number:,} of {path} is {classes!r}, not a list of classes from 0 to "
                f"{CLASSES - 1}"
            )
    return [tuple(classes) for classes in labels]


def open_imagenet(
    kind: str, path: str, split: str, real: Sequence[Classes] | None = None
) -> Source:
    """Opens ImageNet's validation images with their original labels and their ReaL labels.

    Column 0 of an image's labels is the original label. All other columns are the ReaL labels.
    Predictions of one pass over the images are thus sufficient for both metrics:
    `accuracy(predictions, labels[:, :1])` and `accuracy(predictions, labels[:, 1:])`.

    Args:
      kind: `tfds` for a TFDS data set, or `folder` for a folder of class folders. The name of a
        class folder is the class's synset.
      path: name of the TFDS data set, or path of the folder.
      real: labels from `read_real`, `real[0]` for image 1. The number of an image is in its file
        name. None: no ReaL labels.

    Raises:
      UserError: the data are missing or are not ImageNet's, or an image's file name has no number.
    """
    most = 1 + max((len(classes) for classes in real or ()), default=0)
    if kind == "tfds":
        builder = tfds_builder(path)
        names = tuple(tfds_feature(builder, "label").names)
        check_classes(names, path)
        if real is not None:
            tfds_feature(builder, "file_name")
        read = partial(_read_validation, real=real)
        records, shards = tfds_split(builder, split), tfds_shards(builder, split)
        name = f"{builder.info.full_name} {split}"
        return Records(name, records, read, names, most, distinct=real is None, shards=shards)
    folder = Folder.scan(path, split.split("[")[0])
    check_classes(folder.class_names, path)
    chosen = tuple(map(int, chosen_images(folder, split)))
    labels = tuple(
        (folder.labels[i], *_real_classes(PurePath(folder.files[i]).name, real)) for i in chosen
    )
    return Relabelled(folder, chosen, labels, folder.class_names, most)


def _read_validation(features: Mapping, real: Sequence[Classes] | None) -> Example:
    image, labels = image_and_labels(features, "label")
    if real is None:
        return Example(image, labels)
    (name,) = features["file_name"].bytes_list.value
    return Example(image, labels + _real_classes(name.decode(), real))


def _real_classes(name: str, real: Sequence[Classes] | None) -> Classes:
    """Returns ReaL's correct classes of a validation image, given its file name."""
    if real is None:
        return ()
    match = VALIDATION_NAME.fullmatch(name)
    if not match or not 1 <= int(match[1]) <= len(real):
        raise UserError(
            f"ReaL has no labels for an image {name!r}: it has ILSVRC2012_val_00000001 to "
            f"ILSVRC2012_val_{len(real):08}"
        )
    return real[int(match[1]) - 1]


@dataclasses.dataclass(frozen=True)
class Relabelled(Source):
    """Images of a source with new labels, and without `border` pixels at each edge."""

    source: Source
    indices: tuple[int, ...]
    labels: tuple[Classes, ...]
    class_names: tuple[str, ...]
    max_labels: int
    border: int = 0  # Width of the border in pixels.

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        image = self.source[self.indices[index]].image
        if self.border:
            with contextlib.suppress(Unreadable):  # The pipeline will report the unreadable image.
                image = decode(image)[self.border : -self.border, self.border : -self.border]
        return Example(image, self.labels[index])

    def describe(self, index):
        return self.source.describe(self.indices[index])

    def known_labels(self):
        table = np.full((len(self), self.max_labels), -1, np.int32)
        for row, labels in zip(table, self.labels, strict=True):
            row[: len(labels)] = labels
        return table

    def stored_files(self, indices=None):
        chosen = np.asarray(self.indices)
        return self.source.stored_files(chosen if indices is None else chosen[indices])


def read_objectnet_map(root: str) -> dict[str, Classes]:
    """Returns the ImageNet classes of each ObjectNet folder, by the folder's name.

    Folders whose class is not in ImageNet are omitted.

    Raises:
      UserError: a file of the class map is missing, or the files contradict each other.
    """
    where = epath.Path(root) / "mappings"
    expected = f"a part of ObjectNet's class map: unpack all of objectnet-1.0.zip ({OBJECTNET_URL})"
    folders = _read_json(where / "folder_to_objectnet_label.json", dict, expected)
    overlap = _read_json(where / "objectnet_to_imagenet_1k.json", dict, expected)
    positions = _read_json(where / "pytorch_to_imagenet_2012_id.json", dict, expected)
    lines = _read_text(where / "imagenet_to_label_2012_v2", expected).splitlines()
    # The keys of `positions` are class indices, in the order of synsets. The values are indices of
    # `lines`, the list of the classes' English names.
    if sorted(positions.values()) != list(range(CLASSES)) or len(lines) != CLASSES:
        raise UserError(
            f"{where}: pytorch_to_imagenet_2012_id.json must number the {CLASSES:,} lines of "
            f"imagenet_to_label_2012_v2, which has {len(lines):,}"
        )
    number = {lines[line].strip(): int(label) for label, line in positions.items()}
    if len(overlap) != OBJECTNET_CLASSES:
        raise UserError(
            f"{where}/objectnet_to_imagenet_1k.json has {len(overlap)} classes, not "
            f"{OBJECTNET_CLASSES}"
        )
    folder_of = {name: folder for folder, name in folders.items()}
    classes = {}
    for name, labels in overlap.items():
        if name not in folder_of:
            raise UserError(
                f"{where}/folder_to_objectnet_label.json has no folder of the class {name!r}"
            )
        for label in labels.split("; "):
            if label not in number:
                raise UserError(
                    f"{where}/imagenet_to_label_2012_v2 has no line {label!r}, which "
                    f"objectnet_to_imagenet_1k.json has for {name!r}"
                )
        classes[folder_of[name]] = tuple(number[label] for label in labels.split("; "))
    return classes


def open_objectnet(root: str) -> Relabelled:
    """Opens ObjectNet's images in `root` of those classes that ImageNet also has.

    The red border of the images is removed. A model may predict any of ImageNet's classes. The
    prediction of a class that ObjectNet does not have is always wrong.

    Raises:
      UserError: the class map or the images of a class are missing.
    """
    classes = read_objectnet_map(root)
    folder = Folder.scan(root, "images")
    right = tuple(classes.get(name) for name in folder.class_names)
    if missing := sorted(
        set(classes) - {folder.class_names[label] for label in set(folder.labels)}
    ):
        raise UserError(
            f"{root}/images has no images of {', '.join(missing[:20])}: unpack all of "
            f"objectnet-1.0.zip ({OBJECTNET_URL})"
        )
    indices = tuple(index for index, label in enumerate(folder.labels) if right[label])
    labels = tuple(right[folder.labels[index]] for index in indices)
    names = tuple(map(str, range(CLASSES)))
    return Relabelled(folder, indices, labels, names, max(map(len, labels)), OBJECTNET_BORDER)


def objectnet_crop(size: int) -> TestCrop:
    """Returns BiT's ObjectNet transform for models with an image size of `size` pixels.

    The short side is resized to 512 / 480 times `size`. Then the central square is cropped.
    """
    return TestCrop(size, "short_side", round(size * 512 / 480))


def _read_json(path: epath.PathLike, kind: type, expected: str):
    text = _read_text(path, expected)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): it should be {expected}") from error
    if not isinstance(value, kind):
        raise UserError(
            f"{path} contains a {type(value).__name__}, not a {kind.__name__}: it should be "
            f"{expected}"
        )
    return value


def _read_text(path: epath.PathLike, expected: str) -> str:
    try:
        return epath.Path(path).read_text()
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror or error}), {expected}") from error
