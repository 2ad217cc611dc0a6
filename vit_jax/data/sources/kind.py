"""Interface of a kind of data source; `SOURCES` in this package's `__init__.py` lists all kinds."""

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from vit_jax.data.sources.base import Source


class SourceOptions(NamedTuple):
    """Options of a data set in addition to its kind and its split.

    Attributes:
      path: path of the data set; see `SourceKind.path`.
      label_key: the feature with the label or labels; None: labels are not needed.
      class_names: class names of the training split; other splits use the same indices.
      num_classes: number of classes, if the data set does not define it.
      parts: `kind:path` of each part of a mixture.
      weights: shares of the parts in training; None: all examples have the same weight.
      image_size: height and width of synthetic images, in pixels.
      labels: labels are required; otherwise images without labels are included, too.
      slices: `stratified`: a slice is a representative sample; `in_order`: slices follow the stored
        order.
      groups: defines groups of images that are not divided between slices: a regular expression for
        paths, the name of a column, or the group of each image of `train`. None: no groups.
      only: names of the classes that the user has chosen.
      fields: names of the required fields of examples, such as `text`.
      caption_key: name of the column or key with the captions, for the field `text`.
      each_labelled: an example without a label is an error (softmax); otherwise it is an example of
        no class.
      depth_scale: metres per unit of 16-bit depth maps.
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
    """A kind of data source: its name in a config, the function to open it, and its properties.

    Attributes:
      name: name in `config.data.source` and in `kind:path`.
      about: short description of the images.
      open: `(split, options) -> source`. The split is a name without slices; slices such as
        `train[:90%]` are cut out of the source's `fair_order`, unless `reads_slices`.
      path: description of the path; empty if the kind needs none.
      reads_slices: `open` supports slices itself.
      stands_alone: `kind:path` is sufficient to open a data set and to evaluate models on it.
      made_up: images are random; splits may share them.
      name_of: returns the name of the data set at a path, for metrics and tables.
      is_whole: returns True if the data set at a path has no splits, so that the user must define
        slices for training and test.
      counts: returns the numbers of training images and classes at a path, if known without reading
        images.
      layout_at: returns a description of the layout at a path and the names of its splits, for
        kinds with several layouts.
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
