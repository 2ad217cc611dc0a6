"""Where labelled images come from: random access, one small interface.

A source has a length; `source[index]` is an `Example`; `describe(index)` names it for a person.
Sources are read by many threads and sent to worker processes, so they hold no open files.
"""

from collections.abc import Sequence

from vit_jax.data.sources.array_record import array_records, tfds_records
from vit_jax.data.sources.base import Source, of_classes
from vit_jax.data.sources.folder import Folder
from vit_jax.data.sources.in_memory import Synthetic, digits
from vit_jax.data.sources.mixture import Mixture
from vit_jax.data.sources.slices import sliced
from vit_jax.errors import UserError, nearest

KINDS = ("digits", "folder", "tfds", "vtab", "array_record", "synthetic", "mixture")


def open_source(
    kind: str,
    split: str,
    *,
    path: str = "",
    label_key: str = "label",
    class_names: tuple[str, ...] | None = None,
    num_classes: int | None = None,
    parts: tuple[str, ...] = (),
    weights: tuple[float, ...] | None = None,
    image_size: int = 224,
    only: Sequence[str] | None = None,
    labels: bool = True,
) -> Source:
    """Opens a split of a data set.

    Args:
      kind: one of `KINDS`.
      split: its name, with TFDS's slices: `train`, `train[:90%]`, `test[100:]`, `all[:80%][:90%]`. A slice is
        a fair sample, whatever the order of the images; the whole comes in that order.
      path: of `folder`, where it is (also `gs://`, `s3://`); of `tfds`, `name` or `name:data_dir` of a
        prepared data set or the folder that holds its files; of `vtab`, `task` or `task:data_dir`; of
        `array_record`, a pattern of files.
      label_key: the TFDS feature that holds the label or the labels.
      class_names: of the training split, whose numbering a folder's test split then shares.
      num_classes: of `array_record` files and `synthetic` images, which don't say it.
      parts: of a `mixture`: `kind:path` each.
      weights: shares of the parts in training; None lets every example count the same.
      image_size: of `synthetic` images.
      only: names of classes; the others' images are left out, and these are numbered in this order.
      labels: they are needed; else a folder needs no classes, and a data set no feature for them.

    Raises:
      UserError: what does not exist, is empty or cannot be read.
    """
    if only is not None:
        arguments = dict(path=path, label_key=label_key, num_classes=num_classes, image_size=image_size)
        return of_classes(open_source(kind, split, parts=parts, weights=weights, **arguments), only)
    name = split.split("[")[0]
    if kind == "digits":
        return sliced(digits(name), split)
    if kind == "folder":
        return sliced(Folder.scan(path, name, class_names, labels), split)
    label_key = label_key if labels or only else None
    if kind == "tfds":
        return tfds_records(path, split, label_key)
    if kind == "vtab":
        from vit_jax.data.vtab import open_task

        return open_task(path, split)
    if kind == "array_record":
        return sliced(array_records(path, label_key, num_classes), split)
    if kind == "synthetic":
        return sliced(Synthetic(image_size, num_classes or 10), split)
    if kind == "mixture":
        opened = []
        for part in parts:
            part_kind, _, part_path = part.partition(":")
            arguments = dict(label_key=label_key, class_names=class_names, num_classes=num_classes)
            arguments["labels"] = labels
            opened.append(open_source(part_kind, split, path=part_path, image_size=image_size, **arguments))
        return Mixture.join(opened, weights, class_names)
    raise UserError(f"unknown data source {kind!r} (data.source); {nearest(kind, KINDS)}")
