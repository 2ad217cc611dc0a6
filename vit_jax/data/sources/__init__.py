"""Data sources: data sets with random access by index, in a common interface.

`len(source)` is the number of examples, `source[index]` is an `Example`, and
`source.describe(index)` returns the example's name for messages. Many threads read a source, and
sources are pickled for worker processes. Therefore a source has no open files.

`SOURCES` lists all kinds of sources. To add a kind, write a module with a `SourceKind`, and add it
to `SOURCES`.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.data.fields import MASK, TEXT
from vit_jax.data.sources.array_record import ARRAY_RECORD
from vit_jax.data.sources.base import Source, of_classes
from vit_jax.data.sources.coco import COCO
from vit_jax.data.sources.coloured import COLOURED
from vit_jax.data.sources.composed import CENTRED, SCATTERED
from vit_jax.data.sources.csv_list import CSV, LISTS
from vit_jax.data.sources.depth import DEPTHS
from vit_jax.data.sources.digits import DIGITS
from vit_jax.data.sources.folder import FOLDER
from vit_jax.data.sources.handed_in import HANDED_IN, handed_in
from vit_jax.data.sources.handed_in_masks import handed_in_masks
from vit_jax.data.sources.kind import SourceKind, SourceOptions
from vit_jax.data.sources.masks import MASKS
from vit_jax.data.sources.mixture import mixture_of
from vit_jax.data.sources.slices import hashed, sliced
from vit_jax.data.sources.synthetic import SYNTHETIC
from vit_jax.data.sources.tfds import TFDS
from vit_jax.data.sources.vtab import VTAB
from vit_jax.errors import UserError, nearest

WHOLE_PATH = r"[\s\S]+"  # Value of `data.groups` for which each file is a group.


def open_source(kind: str, split: str, *, only: Sequence[str] | None = None, **options) -> Source:
    """Opens a split of a data set.

    Args:
      kind: one of `SOURCES`.
      split: name of the split, optionally with slices as in TFDS: `train`, `train[:90%]`,
        `test[100:]`, `all[:80%][:90%]`. A slice is a representative sample, even if images are
        stored by class. A split without a slice has the stored order.
      only: names of the classes to use, in the order of their new indices. Images of other classes
        are excluded. None: all classes.
      **options: `path` and other fields of `SourceOptions`.

    Raises:
      UserError: the data set does not exist, is empty or cannot be read.
    """
    source_options = SourceOptions(**options)
    if only is not None:  # `only` defines the class names and their order.
        if source_options.weights:
            raise UserError(
                "data.weights and data.classes together are unsupported: images of some classes "
                "would not come in these shares; give one of them"
            )
        source_options = source_options._replace(
            class_names=None, labels=True, only=tuple(map(str, only))
        )
        return of_classes(_open(kind, split, source_options), only)
    return _open(
        kind,
        split,
        source_options if source_options.labels else source_options._replace(label_key=None),
    )


def open_handed_in(
    data: Mapping[str, Any], split: str, *, only: Sequence[str] | None = None, **options
) -> Source:
    """Opens a split of data sets that the caller passes in as Python objects.

    Args:
      data: the data set of each split (`train`, `test`). `handed_in` lists the supported types.
      split, only, options: as in `open_source`.

    Raises:
      UserError: the split is missing or is not a data set, or it lacks labels or fields that the
        options require.
    """
    source_options, name = SourceOptions(**options), split.split("[")[0]
    if data.get(name) is None:
        raise UserError(
            f"there are no {name} data: pass {name}=..., or slice them out of others, as with "
            "config.data.train_split='train[:90%]' and config.data.test_split='train[90%:]'"
        )
    if only is not None:
        source_options = source_options._replace(class_names=None, labels=True)
    source = _handed_in(data[name], name, source_options)
    groups = (
        source_options.groups if isinstance(source_options.groups, str) or name == "train" else None
    )
    if groups is not None and not isinstance(groups, str) and len(groups) != len(source):
        raise UserError(f"groups has {len(groups):,} entries, and train {len(source):,} examples")
    part = _cut(source, split, source_options._replace(groups=groups))
    return part if only is None else of_classes(part, only)


def _handed_in(data: Any, name: str, options: SourceOptions) -> Source:
    """Returns the source of a split that the caller passes in, without slicing."""
    if MASK in options.fields:
        return handed_in_masks(data, name, options.class_names, options.num_classes)
    return handed_in(
        data,
        name,
        labels=options.labels,
        class_names=options.class_names,
        num_classes=options.num_classes,
        label_key=options.label_key or "label",
        caption_key=options.caption_key if TEXT in options.fields else None,
    )


def _open(kind: str, split: str, options: SourceOptions) -> Source:
    if kind not in SOURCES:
        raise UserError(f"unknown data source {kind!r} (data.source); {nearest(kind, SOURCES)}")
    if SOURCES[kind].reads_slices:
        if options.slices == "hashed" and SOURCES[kind] is not MIXTURE:
            raise UserError(
                f"data.slices='hashed' is unsupported with {kind}; give 'stratified', the default"
            )
        if options.groups is not None and SOURCES[kind] is not MIXTURE:
            raise UserError(
                f"data.groups is unsupported with {kind}, whose slices are those of its files"
            )
        return SOURCES[kind].open(split, options)
    return _cut(SOURCES[kind].open(split.split("[")[0], options), split, options)


def _cut(source: Source, split: str, options: SourceOptions) -> Source:
    """Returns the slice of a source that a split name such as `train[:90%]` denotes.

    The options define whether slices are representative samples, follow the stored order, or
    depend on hashes of the images' paths or groups.
    """
    groups = options.groups
    if isinstance(groups, str):
        groups = source.groups(groups) if "[" in split else None
    if options.slices != "hashed" or "[" not in split:
        return sliced(source, split, options.slices == "in_order", groups)
    if groups is None:
        try:
            groups = source.groups(WHOLE_PATH)
        except UserError as error:
            raise UserError(
                "data.slices='hashed' needs image files with paths, or groups (data.groups)"
            ) from error
    return hashed(source, split, [str(group) for group in groups])


MIXTURE = mixture_of(_open)

SOURCES: dict[str, SourceKind] = {
    kind.name: kind
    for kind in (
        *(DIGITS, SCATTERED, CENTRED, COLOURED, FOLDER, CSV, MASKS, DEPTHS, COCO, TFDS, VTAB),
        *(ARRAY_RECORD, MIXTURE, SYNTHETIC, HANDED_IN),
    )
}


SPLITS = ("train", "test")  # Splits whose files may be listed in a file of the data set's folder.


class DataSet(NamedTuple):
    """A data set to evaluate on."""

    name: str  # Name of the data set in metrics and tables.
    kind: str
    path: str
    train_split: str
    test_split: str


def data_set(text: str) -> DataSet:
    """Parses `kind:path` or `kind:path@TRAIN_SPLIT,TEST_SPLIT`; default splits are train and test.

    Kinds and paths are values of `data.source` and `data.path`. The kind is optional for a local
    folder or CSV. The data set's name is derived from the path: it is `uc_merced` for
    `tfds:uc_merced@train[:1000],train[1000:]`.

    Raises:
      UserError: the text does not have this form.
    """
    kinds = {name: kind for name, kind in SOURCES.items() if kind.stands_alone}
    if os.path.exists(str(text).partition("@")[0]):
        text = f"{_kind_at(str(text).partition('@')[0])}:{text}"
    match = re.fullmatch(r"(\w+):([^@]*)(?:@([^@,]+),([^@,]+))?", str(text))
    kind = kinds.get(match[1]) if match else None
    if not match or not kind or (kind.path and not match[2]):
        raise _not_a_data_set(text, kinds)
    path = match[2]
    return DataSet(
        kind.name_of(path) or kind.name, kind.name, path, match[3] or "train", match[4] or "test"
    )


def _not_a_data_set(text: str, kinds: Iterable[str]) -> UserError:
    """Returns the error for a text that does not describe a data set."""
    is_path = os.sep in text and ":" not in text
    mistake = f"there is no {text}" if is_path else f"cannot read the data set {text!r}"
    return UserError(
        f"{mistake}: write it as tfds:cifar100, folder:/data/pets or "
        f"tfds:uc_merced@train[:1000],train[1000:]; kinds are {', '.join(kinds)}"
    )


def _kind_at(path: str) -> str:
    """Returns the kind of the data set at an existing path."""
    if os.path.isfile(os.path.join(path, "dataset_info.json")):
        return "tfds"
    named = [os.path.join(path, f"{split}{suffix}") for split in SPLITS for suffix in LISTS]
    lists = path.lower().endswith(LISTS) or any(map(os.path.isfile, named))
    return "csv" if lists else "folder"
