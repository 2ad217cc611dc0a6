"""Interface of a kind of data source; `SOURCES` in this package's `__init__.py` lists all kinds."""

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from vit_jax.data.sources.base import Source


class SourceOptions(NamedTuple):
    """Options of a data set in addition to its kind and its split.

    Attributes:
      path: see the kind's own `path`.
      label_key: the feature of a record that holds its label or labels; None if labels are not
        needed.
      class_names: class names of the training split; other splits use the same numbers.
      num_classes: number of classes, for data that do not contain it.
      parts: `kind:path` of each part of a mixture.
      weights: shares of the parts in training; None gives every example the same weight.
      image_size: pixels, for synthetic images.
      labels: labels are required; otherwise images without labels are included, too.
      slices: `stratified`, so that a slice is a sample, or `in_order`, by the source's own order.
      groups: a regular expression for the path or a column that names each image's group, or the
        groups of all images of `train`; a slice has all images of a group or none. None: no groups.
      only: names of the classes that the user has chosen.
      fields: names of the required fields of examples, such as `text`.
      caption_key: name of the column or key that contains the captions `text`.
      each_labelled: an example without a label is an error, as for a softmax; otherwise it has no
        class.
      depth_scale: metres of a unit of 16-bit depth maps.
    """

    path: str = ""
    label_key: str | None = "label"
    class_names: tuple[str, ...] | None = None
    num_classes: int | None = None
    parts: tuple[str, ...] = ()
    weights: tuple[float, ...] | None = None
    image_size: int = 224
    labels: bool = True
    slices: str = "stratified"
    groups: str | Sequence | None = None
    only: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    caption_key: str = "caption"
    each_labelled: bool = False
    depth_scale: float = 0.001


def last_folder(path: str) -> str:
    """Returns the last folder of a path, ignoring version numbers; empty if there is none."""
    folders = [part for part in path.split("/") if not re.fullmatch(r"[\d.]*", part)]
    return folders[-1] if folders else ""


@dataclasses.dataclass(frozen=True)
class SourceKind:
    """A kind of data source: its name in a config, its function to open it, and its properties.

    Attributes:
      name: its name in `config.data.source` and in `kind:path`.
      about: short description of its images.
      open: maps a split and the options to the source. The split is a bare name, and slices such as
        `train[:90%]` are cut out of the source's fair order, unless `reads_slices`.
      path: description of its path; empty if it needs none.
      reads_slices: `open` accepts slices and cuts them itself.
      stands_alone: `kind:path` is sufficient to open it, so that models can be evaluated on it.
      made_up: its images are random, so that splits may share them.
      name_of: returns the name of the data set at a path, for metrics and tables.
      is_whole: returns True if a path has no splits train and test, so that a user has to cut them.
      counts: returns the numbers of training images and classes at a path, if known without
        reading.
      layout_at: returns a description of the layout at a path and the names of its splits, for
        kinds of several layouts.
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
    counts: Callable[[str], tuple[int, int] | None] = lambda path: None
    layout_at: Callable[[str], tuple[str, Collection[str]]] | None = None
