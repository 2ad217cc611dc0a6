"""Images with masks that the caller passes in: arrays, or any sequence of pairs."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit_jax.data.fields import MASK
from vit_jax.data.map_files import decode_mask, values_of
from vit_jax.data.sources.base import Example, Source, naming
from vit_jax.data.sources.folder import read_file
from vit_jax.data.sources.handed_in import (
    IMAGE_KEYS,
    as_image,
    check_indexable,
    check_steady,
    checked_columns,
    is_pair_of_columns,
    reading,
)
from vit_jax.data.sources.masks import as_they_are, check_two_classes, class_count, classes_of
from vit_jax.data.sources.slices import shuffled
from vit_jax.errors import UserError

MASK_KEYS = ("mask", "annotation", "segmentation_mask", "label")
REMEDY = "give their number as config.data.num_classes"


@dataclasses.dataclass(frozen=True)
class HandedInMasks(Source):
    """Images and masks that the caller passes in. Each read of an item must return equal values.

    Attributes:
      data: supports `len(data)` and `data[index]`. An item is a pair (image, mask), or a mapping
        with an image under one of the keys in `IMAGE_KEYS`, such as `image`, and a mask under one
        of the keys in `MASK_KEYS`, such as `mask`.
    """

    name: str
    data: Any
    class_names: tuple[str, ...] = ()
    numbered: bool = True
    fields = (MASK,)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return Example(self._read(index, as_image, 0, IMAGE_KEYS), ())

    def describe(self, index):
        return f"{self.name} data's example {index}"

    def labels_of(self, index):
        return ()

    def fair_order(self):
        return shuffled(len(self))

    def fields_of(self, index):
        values, number = self.values(index), len(self.class_names)
        with naming(self.describe(index)):
            return {MASK: classes_of(values, as_they_are(number), number, REMEDY)}

    def values(self, index: int) -> np.ndarray:
        """Returns the values of a mask, integers `[height, width]`."""
        return self._read(index, as_mask, 1, MASK_KEYS)

    def _read(self, index: int, convert, place: int, keys: Sequence[str]) -> Any:
        """Returns the image (`place` 0) or mask (1) of an item, converted by `convert`.

        It is at `place` in a pair, and at one of `keys` in a mapping.

        Raises:
          UserError: the image or mask does not exist or cannot be read.
        """
        with reading(self.describe(index)):
            item = self.data[index]
            if isinstance(item, tuple | list):
                return convert(item[place])
            if not isinstance(item, Mapping):
                raise UserError(f"a {type(item).__name__} is no pair (image, mask)")
            key = next((key for key in keys if key in item), None)
            if key is None:
                raise UserError(f"there is none of {', '.join(keys)}, but {', '.join(item)}")
            return convert(item[key])


@dataclasses.dataclass(frozen=True)
class _Zipped:
    """A sequence of pairs, made of a column of images and a column of masks."""

    images: Any
    masks: Any

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.masks[index]


def handed_in_masks(
    data: Any, name: str, class_names: Sequence[str] | None = None, num_classes: int | None = None
) -> Source:
    """Returns a source for images with masks.

    Args:
      data: a pair of images and masks; a sequence (`len(data)`, `data[index]`) of pairs `(image,
        mask)` or of mappings with `image` and `mask`; or a `Source`. Images are as in `handed_in`.
        A mask contains integers `[height, width]`; it is an array, a tensor, a PIL image or a PNG
        file.
      name: name of the data in error messages, such as "train".
      class_names: class names of the training data; None: `data` is the training data.
      num_classes: number of classes. None: all masks are read to determine it.

    Raises:
      UserError: the data have an unsupported type, or the values in the masks are not 0, 1, 2, ...
    """
    if isinstance(data, Source):
        if class_names and tuple(class_names) != data.class_names:
            raise UserError(
                f"the {name} data have other classes than the training data, and masks are not "
                f"renumbered: {', '.join(data.class_names[:10])} and {', '.join(class_names[:10])}"
            )
        return data
    if is_pair_of_columns(data):
        data = _Zipped(*checked_columns(data, name, "masks"))
    check_indexable(data, name)
    source = HandedInMasks(name, data)
    present = (np.unique(source.values(index)) for index in range(len(source)))
    if not class_names:
        if num_classes == 2:
            check_two_classes(present, f"the {name} data")
        number = num_classes or class_count(present, f"the {name} data", REMEDY)
        class_names = tuple(map(str, range(number)))
    source = dataclasses.replace(source, class_names=tuple(class_names))
    check_steady(source, name)
    source.fields_of(0)
    return source


def as_mask(value: Any) -> np.ndarray:
    """Converts a mask to integers `[height, width]`.

    Raises:
      UserError: the value is not a mask.
    """
    if isinstance(value, bytes | bytearray):
        return decode_mask(bytes(value))
    if isinstance(value, str | Path):
        return decode_mask(read_file(str(value)))
    if isinstance(value, Image.Image):
        return values_of(value)
    detach = getattr(value, "detach", None)  # A torch tensor.
    return _as_mask(np.asarray(detach().cpu() if detach else value))


def _as_mask(values: np.ndarray) -> np.ndarray:
    """Removes a channel axis of size 1; raises UserError if the values are not a mask."""
    if values.ndim == 3 and 1 in (values.shape[0], values.shape[-1]):
        values = values.squeeze(0 if values.shape[0] == 1 else -1)
    if values.ndim != 2 or values.dtype.kind not in "iub":
        raise UserError(
            f"a mask must be integers [height, width], not {list(values.shape)} of {values.dtype}"
        )
    if values.size and values.min() < 0:
        raise UserError(f"a mask has the value {values.min()}: unknown pixels have the value 255")
    return values.astype(np.uint8) if values.dtype.kind == "b" else values
