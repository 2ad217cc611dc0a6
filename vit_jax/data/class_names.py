"""Matches the classes of a model and a data set, or of two data sets, by name."""

import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.small_files import read_lines

SHOWN = 3  # Maximum number of renamed classes that a note lists.


def parse_names(text: str) -> list[str]:
    """Returns the class names in the value of `--names`: separated by commas, or lines of a file.

    Raises:
      UserError: the file does not exist or cannot be read.
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
      order: for each class index of the data set, the class index of the model, int `[classes]`.
      note: a note for the user about the match; empty if model and data set have the same names.
    """

    order: np.ndarray
    note: str = ""

    @property
    def reordered(self) -> bool:
        """True if a class has different indices in the data set and in the model."""
        return not np.array_equal(self.order, np.arange(len(self.order)))


def match_classes(model: Sequence[str], data: Sequence[str], place: str) -> Match:
    """Matches the classes of a model and a data set with the same number of classes.

    Names are compared without case, `_` and `-`. If model and data set have the same names in
    different orders, the classes are matched by name. If one of them has no names, the classes are
    matched by index. If only some names are shared, the classes are matched by index, too: every
    shared name must have the same index in model and data set. The other classes count as renamed.

    Args:
      model: names of the model's classes, by index. If the names are unknown: "0", "1", "2", ...,
        or an empty list.
      data: names of the data set's classes, in the same form.
      place: description of the model, for messages.

    Raises:
      UserError: only some names are shared, and one of them has different indices in model and data
        set.
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
    """Returns the model's class index for each class of the data set, int `[classes]`.

    The result is None if both do not have the same names, or if a name occurs twice.
    """
    model_keys, data_keys = ([_key(name) for name in names] for names in (model, data))
    number = {key: label for label, key in enumerate(model_keys)}
    if len(number) < len(model_keys) or sorted(model_keys) != sorted(data_keys):
        return None
    return np.array([number[key] for key in data_keys])


def _check_names_in_place(model: Sequence[str], data: Sequence[str], place: str) -> None:
    """Raises UserError if a class name that model and data set share has two different indices."""
    number = {_key(name): label for label, name in enumerate(model)}
    for label, name in enumerate(data):
        if _key(name) != _key(model[label]) and _key(name) in number:
            raise UserError(
                f"the classes of {place} differ from the data's: its class {label} is "
                f"{model[label]!r}, that of the data {name!r}, its class {number[_key(name)]}"
            )


def _renamings(model: Sequence[str], data: Sequence[str]) -> str:
    """Returns a text that lists the first classes with different names in model and data set."""
    pairs = [
        f"{model_name!r} is {data_name!r} here"
        for model_name, data_name in zip(model, data, strict=False)
        if _key(model_name) != _key(data_name)
    ]
    more = f" and {len(pairs) - SHOWN:,} more" if len(pairs) > SHOWN else ""
    return ", ".join(pairs[:SHOWN]) + more


def has_names(class_names: Sequence[str]) -> bool:
    """Returns True unless the class names are the numbers 0, 1, 2, ... in this order."""
    return any(name != str(number) for number, name in enumerate(class_names))


def numbers_by_name(
    data_names: Sequence[str], class_names: Sequence[str], used: Collection[int]
) -> dict[int, int] | None:
    """Maps the class indices of a data set to the training data's indices, by class name.

    Args:
      data_names: class names of the data set.
      class_names: class names of the training data.
      used: indices of the data set's classes that have an example.

    Returns:
      A dictionary from the class index in the data set to the class index in the training data.
      None if the indices stay unchanged: data set and training data have the same names, or one
      of the two has no names. The names 0, 1, 2, ... usually count as no names. But if all names
      of data set and training data are numbers, the numbers are matched as names. For example,
      the result is {0: 0, 1: 2, 2: 3} for a data set with the folders 0, 2, 3 and training data
      with the classes 0, 1, 2, 3.

    Raises:
      UserError: a class in `used` is not among `class_names`, or a name occurs twice.
    """
    data_names, class_names = tuple(data_names), tuple(class_names)
    if data_names == class_names or not _comparable(data_names, class_names):
        return None
    _check_distinct(data_names)
    _check_distinct(class_names)
    number = {name: label for label, name in enumerate(class_names)}
    used_names = [data_names[label] for label in sorted(used) if label < len(data_names)]
    if unknown := [name for name in used_names if name not in number]:
        raise UserError(
            f"classes that the training data do not have: {shortened(unknown)}; training has: "
            f"{shortened(class_names)}"
        )
    return {label: number[name] for label, name in enumerate(data_names) if name in number}


def _comparable(data_names: tuple[str, ...], class_names: tuple[str, ...]) -> bool:
    """Returns True if both data sets have class names, or if all of their names are numbers.

    The list 0, 1, 2, ... counts as no names. If both lists are of this form, the result is False.
    """
    named = has_names(data_names), has_names(class_names)
    if not data_names or not any(named):
        return False
    return all(named) or all(map(str.isdecimal, (*data_names, *class_names)))


def _check_distinct(names: Sequence[str]) -> None:
    for name, count in Counter(names).most_common(1):
        if count > 1:
            raise UserError(
                f"classes cannot be matched by name with the training data's: {name!r} occurs twice"
            )


def alike(names: Sequence[str]) -> list[list[str]]:
    """Returns groups of names that differ only in case, separators or the encoding of letters.

    For example, `é` may be one character, or `e` and an accent. Invisible characters are ignored.
    Names without letters, such as `1` and `-1`, are not compared.
    """
    groups = defaultdict(list)
    for name in names:
        if not any(map(str.isalpha, name)):
            continue
        visible = "".join(x for x in name if unicodedata.category(x) != "Cf")
        groups[_key(unicodedata.normalize("NFKC", visible))].append(name)
    return [group for group in groups.values() if len(group) > 1]


def shortened(names: Sequence[str]) -> str:
    """Joins names by commas; more than 12 names are shortened to the first six and last three."""
    if len(names) <= 12:
        return ", ".join(names)
    return f"{', '.join(names[:6])}, ..., {', '.join(names[-3:])}"


def _key(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())
