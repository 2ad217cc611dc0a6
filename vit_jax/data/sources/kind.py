"""Interface of a kind of data source; `SOURCES` in this package's `__init__.py` lists all kinds."""

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from vit_jax.data.sources.base import Source


class SourceOptions(NamedTuple):
    """Options of a data set in addition to its kind and its split."""

    path: str = ""  # Path of the data set; see `SourceKind.path`.
    # Name of the feature with the label or labels; None: labels are not needed.
    label_key: str | None = "label"
    # Class names of the training split; other splits use the same class indices.
    class_names: tuple[str, ...] | None = None
    num_classes: int | None = None  # Number of classes, if the data set does not define it.
    # `kind:path` of each part of a mixture, which concatenates several data sets.
    parts: tuple[str, ...] = ()
    # Relative sampling weight of each part in training; None: all examples are sampled equally
    # often.
    weights: tuple[float, ...] | None = None
    image_size: int = 224  # Height and width of synthetic images, in pixels.
    labels: bool = True  # Labels are required. False: images without labels are included, too.
    # How slices such as `train[:90%]` are cut. `stratified`: a slice is a representative sample.
    # `in_order`: slices follow the stored order. `hashed`: each image belongs to a slice by the
    # hash of its path or group.
    slices: str = "stratified"
    # Defines groups of images, such as all images of a patient. Images of a group are always in the
    # same slice. Groups are defined by a regular expression for paths, by the name of a column, or
    # by a list with the group of each training image. None: no groups.
    groups: str | Sequence | None = None
    only: tuple[str, ...] = ()  # Names of the classes that the user has chosen.
    fields: tuple[str, ...] = ()  # Names of the required fields of examples, such as `text`.
    # Name of the column or key with the captions, for the field `text`.
    caption_key: str = "caption"
    # True: an example without a label raises an error. False: an example without a label belongs to
    # no class, as in multi-label classification.
    each_labelled: bool = False
    depth_scale: float = 0.001  # Factor from the integers of 16-bit depth maps to metres.


def last_folder(path: str) -> str:
    """Returns the last folder name in a path, skipping version numbers; "" if there is none."""
    folders = [part for part in path.split("/") if not re.fullmatch(r"[\d.]*", part)]
    return folders[-1] if folders else ""


@dataclasses.dataclass(frozen=True)
class SourceKind:
    """A kind of data source: its name in a config, the function to open it, and its properties.

    Attributes:
      name: name of the kind in `config.data.source` and in `kind:path`.
      about: short description of the images.
      open: function that returns the source, called as `open(split, options)`. The split's name
        contains no slice such as `[:90%]`. Slices are later cut out of the source's `fair_order`.
      path: description of the path; empty: the kind needs no path.
      reads_slices: `open` supports slices. It is called with the split's full name, such as
        `train[:90%]`.
      stands_alone: `kind:path` is sufficient to open a data set and to evaluate models on it.
      made_up: images are random. Splits that share images raise no error.
      name_of: called with a path; returns the name of the data set for metrics and tables.
      is_whole: called with a path; returns True if the data set has no splits. The user must then
        define slices for training and test.
      splits_at: called with a path; returns the names of the data set's splits, without opening
        them; empty: unknown. Raises UserError if there is no data set.
      counts: called with a path; returns the numbers of training images and of classes, if they are
        known without reading images.
      layout_at: for kinds with several file layouts: called with a path; returns a description of
        the layout and the names of the splits.
    """

    name: str
    about: str
    open: Callable[[str, SourceOptions], Source]
    path: str = ""
    reads_slices: bool = False
    stands_alone: bool = True
    made_up: bool = False
    name_of: Callable[[str], str] = last_folder
    is_whole: Callable[[str], bool] = lambda path: False
    splits_at: Callable[[str], Collection[str]] = lambda path: ()
    counts: Callable[[str], tuple[int, int] | None] = lambda path: None
    layout_at: Callable[[str], tuple[str, Collection[str]]] | None = None
