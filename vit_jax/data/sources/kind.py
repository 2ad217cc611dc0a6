"""The interface of a kind of data source; `SOURCES` in this package's `__init__.py` lists them."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vit_jax.data.sources.base import Source


class SourceOptions(NamedTuple):
    """The options of a data set, besides its kind and its split.

    Attributes:
      path: see the kind's own `path`.
      label_key: the feature of a record that holds its label or labels; None where labels are not
        wanted.
      class_names: those of the training split, whose numbering another split then shares.
      num_classes: how many classes there are, for data that do not say it.
      parts: `kind:path` of each part of a mixture.
      weights: shares of the parts in training; None lets every example count the same.
      image_size: pixels, for images that are made up.
      labels: they are needed; otherwise images without any are taken too.
      slices: `stratified`, so that a slice is a sample, or `in_order`, by the source's own order.
      groups: a regular expression of the path or a column that names each image's group, or the
        groups of all images of `train`; a slice has all images of a group or none. None: no groups.
      only: names of the classes that the user has chosen.
      each_labelled: an example without a label is an error, as for a softmax; else it is of no
        class.
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
    each_labelled: bool = False


def last_folder(path: str) -> str:
    """The name of the last folder of a path that is not a version's; empty where there is none."""
    folders = [part for part in path.split("/") if not re.fullmatch(r"[\d.]*", part)]
    return folders[-1] if folders else ""


@dataclasses.dataclass(frozen=True)
class SourceKind:
    """A kind of data source: its name in a config, how it is opened, and what is particular about
    it.

    Attributes:
      name: what `config.data.source` and the first word of `kind:path` call it.
      about: what its images are, in a few words.
      open: takes a split and the options, and gives the source. The split is a bare name, and
        slices such as `train[:90%]` are cut out of the source's fair order, unless `reads_slices`.
      path: what its path is, in words; empty where it needs none.
      reads_slices: `open` takes the slices too, and cuts them itself.
      stands_alone: `kind:path` says all that is needed to open it, so that it can be evaluated on.
      made_up: its images are random, so that it does not matter which splits share them.
      name_of: gives the name of the data set at a path, for metrics and tables.
      is_whole: says whether a path holds no splits train and test, so that a user has to cut them.
      counts: gives the training images and classes at a path, where they are known without looking.
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
