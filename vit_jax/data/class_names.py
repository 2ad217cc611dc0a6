"""Matches the classes of a model and a data set, or of two data sets, by name."""

import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.small_files import read_lines

SHOWN = 3  # Renamed classes in a note.


def parse_names(text: str) -> list[str]:
    """Returns the class names of a flag `--names`.

    Args:
      text: names separated by commas, or the path of a file with one name per line.

    Raises:
      UserError: there is no such file, or it cannot be read.
    """
    if os.path.isfile(text):  # False also for a text that is too long for a path.
        return [line.strip() for line in read_lines(text, "names") if line.strip()]
    names = text.split(",")
    if len(names) == 1 and Path(text).suffix in (".txt", ".csv"):
        raise UserError(f"there is no file --names={text}: give names as 'cat,dog', or a file")
    return [name.strip() for name in names]


class Match(NamedTuple):
    """Mapping from the classes of a data set to the classes of a model.

    Attributes:
      order: the model's class index for each class index of the data, int `[classes]`.
      note: a note for the user about the match; empty if the names are the same.
    """

    order: np.ndarray
    note: str = ""

    @property
    def reordered(self) -> bool:
        """True if a class has different indices in the data and in the model."""
        return not np.array_equal(self.order, np.arange(len(self.order)))


def match_classes(model: Sequence[str], data: Sequence[str], place: str) -> Match:
    """Matches the classes of a model with the same number of classes of a data set, by name.

    Names are compared without case, `_` and `-`. Classes are matched by index if one side has no
    names, or if no name occurs at different indices: names that differ are then renamed classes.

    Args:
      model: names of the model's classes, by index; indices or empty if names are unknown.
      data: names of the data set's classes, in the same form.
      place: description of the model, for messages.

    Raises:
      UserError: a common name has different indices, but not all names are common.
    """
    same = np.arange(len(data))
    if tuple(model) == tuple(data):
        return Match(same)
    if (order := _order_by_name(model, data)) is not None:
        match = Match(order)
        note = f"{place} has the data's classes in another order: they are matched by name"
        return match._replace(note=note) if match.reordered else match
    model_named, data_named = has_names(model), has_names(data)
    if not model_named and not data_named:
        return Match(same)
    if not model_named or not data_named:
        lacks = "the data have" if model_named else f"{place} has"
        return Match(same, f"{lacks} no class names: classes are matched by index")
    _check_names_in_place(model, data, place)
    return Match(
        same,
        f"{place} has other class names; classes are matched by index: {_renamings(model, data)}",
    )


def _order_by_name(model: Sequence[str], data: Sequence[str]) -> np.ndarray | None:
    """Returns the model's index of each data class; None if the names differ or repeat."""
    model_keys, data_keys = ([_key(name) for name in names] for names in (model, data))
    number = {key: label for label, key in enumerate(model_keys)}
    if len(number) < len(model_keys) or sorted(model_keys) != sorted(data_keys):
        return None
    return np.array([number[key] for key in data_keys])


def _check_names_in_place(model: Sequence[str], data: Sequence[str], place: str) -> None:
    """Raises UserError if one of the model's class names has another index in the data."""
    number = {_key(name): label for label, name in enumerate(model)}
    for label, name in enumerate(data):
        if _key(name) != _key(model[label]) and _key(name) in number:
            raise UserError(
                f"the classes of {place} differ from the data's: its class {label} is "
                f"{model[label]!r}, that of the data {name!r}, its class {number[_key(name)]}"
            )


def _renamings(model: Sequence[str], data: Sequence[str]) -> str:
    """Returns the first class names that differ between model and data, in pairs, as text."""
    pairs = [
        f"{theirs!r} is {ours!r} here"
        for theirs, ours in zip(model, data, strict=False)
        if _key(theirs) != _key(ours)
    ]
    more = f" and {len(pairs) - SHOWN:,} more" if len(pairs) > SHOWN else ""
    return ", ".join(pairs[:SHOWN]) + more


def has_names(class_names: Sequence[str]) -> bool:
    """Returns False if the class names are only the numbers 0, 1, 2, ..."""
    return any(name != str(number) for number, name in enumerate(class_names))


def numbers_by_name(
    own: Sequence[str], class_names: Sequence[str], used: Collection[int]
) -> dict[int, int] | None:
    """Maps a data set's class indices to those of the training data, by name.

    Returns:
      The new index by old index; None if the names are the same or one of the two has no names.

    Args:
      own: class names of the data set.
      class_names: class names of the training data.
      used: classes of the data set that have an example.

    Raises:
      UserError: a used class is not among `class_names`, or a name occurs twice.
    """
    own, class_names = tuple(own), tuple(class_names)
    if own == class_names or not (has_names(own) and has_names(class_names)):
        return None
    _check_distinct(own)
    _check_distinct(class_names)
    number = {name: label for label, name in enumerate(class_names)}
    used_names = [own[label] for label in sorted(used) if label < len(own)]
    if unknown := [name for name in used_names if name not in number]:
        raise UserError(
            f"classes that the training data do not have: {shortened(unknown)}; training has: "
            f"{shortened(class_names)}"
        )
    return {label: number[name] for label, name in enumerate(own) if name in number}


def _check_distinct(names: Sequence[str]) -> None:
    for name, count in Counter(names).most_common(1):
        if count > 1:
            raise UserError(
                f"classes cannot be matched by name with the training data's: {name!r} occurs twice"
            )


def shortened(names: Sequence[str], most: int = 12) -> str:
    """Joins names by commas; of more than `most` names only the first and last few."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most // 2])}, ..., {', '.join(names[-(most // 4) :])}"


def _key(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())
