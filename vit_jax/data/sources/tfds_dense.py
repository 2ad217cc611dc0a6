"""Reads boxes and masks of TFDS data sets that are prepared as ArrayRecord files."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from vit_jax.data.decode import open_image
from vit_jax.data.fields import BOXES, IGNORED, MASK, Boxes
from vit_jax.data.map_files import decode_mask
from vit_jax.data.sources.array_record import Records, feature_values, image_and_labels
from vit_jax.data.sources.base import naming
from vit_jax.data.sources.kind import SourceOptions
from vit_jax.data.sources.masks import as_they_are, classes_of
from vit_jax.errors import UserError

Read = Callable[[Mapping], Any]


@dataclasses.dataclass(frozen=True)
class DenseRecords(Records):
    """ArrayRecord files of images with objects or masks."""

    field: str = BOXES  # `boxes` or `mask`.
    # Called with the features of a tf.Example; returns the boxes or the mask.
    read_field: Read = dict

    @property
    def fields(self):
        return (self.field,)

    def fields_of(self, index):
        with naming(self.describe(index)):
            return {self.field: self.read_field(self._features(index))}

    def known_fields(self, indices=None):
        return ()


def dense_reader(builder, options: SourceOptions) -> tuple[str, tuple[str, ...], Read]:
    """Returns the required field, its class names, and a function to read it from a tf.Example.

    The TFDS feature for boxes is a sequence of mappings with `bbox` and `label`, as in VOC and
    COCO. The feature for a mask is an image with one channel, as in Oxford-IIIT Pet.

    Raises:
      UserError: the data set does not have exactly one such feature, the number of classes is
        unknown, or the options select some of the classes.
    """
    if options.only:
        raise UserError("data.classes is unsupported with the boxes and masks of TFDS data sets")
    if BOXES in options.fields:
        name, labels = _only(builder, "sequence with bbox and label", _is_objects)
        return BOXES, tuple(labels.feature["label"].names), partial(_boxes, name=name)
    name, image = _only(builder, "image of one channel", _is_mask)
    names = tuple(getattr(image, "names", None) or map(str, range(options.num_classes or 0)))
    if not names:
        raise UserError(
            f"the masks {name!r} of {builder.info.full_name!r} have no class names: give "
            "--config.data.num_classes"
        )
    if len(names) > IGNORED:
        raise UserError(f"{len(names):,} classes of masks, and at most {IGNORED} are supported")
    return MASK, names, partial(_mask, name=name, classes=len(names))


def _only(builder, kind: str, is_one: Callable[[Any], bool]) -> tuple[str, Any]:
    """Returns the name of the only feature for which `is_one` returns True, and the feature.

    Raises:
      UserError: the data set has no such feature, or several. The message names the `kind`.
    """
    features = builder.info.features
    found = [name for name, feature in features.items() if name != "image" and is_one(feature)]
    if len(found) != 1:
        raise UserError(
            f"the data set {builder.info.full_name!r} must have one {kind}, and has "
            f"{', '.join(found) or 'none'}; its features are: {', '.join(features)}"
        )
    return found[0], features[found[0]]


def _is_objects(feature) -> bool:
    import tensorflow_datasets as tfds

    inner = getattr(feature, "feature", None)
    kinds = {"bbox": tfds.features.BBoxFeature, "label": tfds.features.ClassLabel}
    return isinstance(inner, tfds.features.FeaturesDict) and all(
        name in inner and isinstance(inner[name], kind) for name, kind in kinds.items()
    )


def _is_mask(feature) -> bool:
    import tensorflow_datasets as tfds

    return isinstance(feature, tfds.features.Image) and feature.shape[-1] == 1


def _boxes(features: Mapping, name: str) -> Boxes:
    """Returns the objects in a tf.Example, in pixels.

    TFDS stores a box as top, left, bottom and right, relative to the image.
    """
    image = open_image(image_and_labels(features, None).image)
    shares = np.array(feature_values(features, f"{name}/bbox", "float_list"), np.float32)
    labels = np.array(feature_values(features, f"{name}/label", "int64_list"), np.int32)
    sides = np.array([image.width, image.height] * 2, np.float32)
    corners = shares.reshape(-1, 4)[:, [1, 0, 3, 2]] * sides
    crowd = np.zeros(len(labels), bool)
    if f"{name}/is_crowd" in features:
        crowd = np.array(feature_values(features, f"{name}/is_crowd", "int64_list"), bool)
    kept = (corners[:, 2:] > corners[:, :2]).all(axis=1)
    return Boxes(corners[kept], labels[kept], None, crowd[kept])


def _mask(features: Mapping, name: str, classes: int) -> np.ndarray:
    (content,) = feature_values(features, name, "bytes_list")
    values = decode_mask(content)
    return classes_of(values, as_they_are(classes), classes, "raise data.num_classes")
