"""Mixtures: several data sources, the parts, concatenated into one source."""

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np

from vit_jax.data.fields import BOXES, MASK
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.kind import SourceKind, SourceOptions
from vit_jax.errors import UserError


def _check_named_alike(parts: list[Source]) -> None:
    """Raises UserError if some parts have class names and other parts have only class indices."""
    numbered = [part for part in parts if part.class_names and part.numbered]
    named = [part for part in parts if part.class_names and not part.numbered]
    if named and numbered:
        raise UserError(
            f"{numbered[0].describe(0)} is of a part without class names, and "
            f"{named[0].describe(0)} of one with class names: they cannot be matched; give "
            "parts that all have class names"
        )


def _check_numbers(part: Source, class_names: tuple[str, ...]) -> None:
    """Raises UserError if masks or boxes of a part have other class indices than the mixture."""
    if {MASK, BOXES} & {*part.fields} and part.class_names != class_names[: len(part.class_names)]:
        raise UserError(
            f"{part.describe(0)} is of a part whose classes have other numbers than those of all "
            "data.parts, and masks and boxes are not renumbered: give all parts the same classes, "
            "in the same order"
        )


@dataclasses.dataclass(frozen=True)
class Mixture(Source):
    """Several concatenated sources; classes with the same name are one class of the mixture."""

    parts: tuple[Source, ...]
    class_names: tuple[str, ...]
    max_labels: int = 1
    weights: tuple[float, ...] | None = None

    @classmethod
    def join(
        cls,
        parts: list[Source],
        weights: tuple[float, ...] | None,
        class_names: tuple[str, ...] | None,
    ) -> "Mixture":
        """Concatenates sources.

        Args:
          weights: relative sampling weight of each part in training; None: proportional to the
            part's number of examples.
          class_names: names of all classes. None: the classes of the first part, followed by new
            classes of the second part, and so on.

        Raises:
          UserError: there are no parts, or `weights` or `class_names` do not match the parts.
        """
        if not parts:
            raise UserError(
                "a mixture needs data.parts, such as ('tfds:imagenet2012', 'folder:/data/pets')"
            )
        if weights is not None and (len(weights) != len(parts) or min(weights) <= 0):
            raise UserError(
                f"data.weights {weights} must be {len(parts)} numbers above 0, one for each of "
                "data.parts"
            )
        _check_named_alike(parts)
        all_names = (name for part in parts for name in part.class_names)
        names = class_names or tuple(dict.fromkeys(all_names))
        for part in parts:
            if unknown := sorted(set(part.class_names) - set(names)):
                raise UserError(
                    f"{part.describe(0)} is of a part with classes that training lacks: "
                    f"{', '.join(unknown[:20])}"
                )
            _check_numbers(part, names)
        return cls(tuple(parts), names, max(part.max_labels for part in parts), weights)

    @property
    def sizes(self):
        return tuple(len(part) for part in self.parts)

    @property
    def shared_classes(self):
        parts_of = Counter(name for part in self.parts for name in part.class_names)
        return tuple(name for name in self.class_names if parts_of[name] > 1)

    @property
    def fields(self):
        shared = set.intersection(*({*part.fields} for part in self.parts))
        return tuple(name for name in self.parts[0].fields if name in shared)

    @property
    def left_out(self):
        return sum((Counter(part.left_out) for part in self.parts), Counter())

    def __post_init__(self):
        number = {name: label for label, name in enumerate(self.class_names)}
        tables = tuple(tuple(number[name] for name in part.class_names) for part in self.parts)
        object.__setattr__(self, "_tables", tables)
        object.__setattr__(self, "_ends", np.cumsum(self.sizes))

    def __len__(self):
        return int(self._ends[-1])

    def _locate(self, index: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return part, index - (int(self._ends[part - 1]) if part else 0)

    def __getitem__(self, index):
        part, index = self._locate(index)
        example = self.parts[part][index]
        return example._replace(labels=self._renumbered(part, example.labels))

    def labels_of(self, index):
        part, index = self._locate(index)
        return self._renumbered(part, self.parts[part].labels_of(index))

    def known_labels(self):
        known = [part.known_labels() for part in self.parts]
        if any(table is None for table in known):
            return None
        table = np.full((len(self), self.max_labels), -1, np.int32)
        for end, labels, numbers in zip(self._ends, known, self._tables, strict=True):
            # A label of -1 (padding) selects the array's last entry, -1. So padding remains -1.
            renumbered = np.array([*numbers, -1], np.int32)[labels]
            table[end - len(labels) : end, : labels.shape[1]] = renumbered
        return table

    def _renumbered(self, part: int, labels: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._tables[part][label] for label in labels)

    def fields_of(self, index):
        part, index = self._locate(index)
        return self.parts[part].fields_of(index)

    def stored_files(self, indices=None):
        for part, rows in self._split(indices):
            yield from part.stored_files(rows)

    def known_fields(self, indices=None):
        for part, rows in self._split(indices):
            yield from part.known_fields(rows)

    def _split(self, indices):
        """Divides indices of the mixture among its parts; yields pairs (part, indices in the part).

        If `indices` is None, the second element of each pair is None: all examples of the part.
        """
        for part, end in zip(self.parts, self._ends, strict=True):
            if indices is None:
                yield part, None
                continue
            rows = np.asarray(indices) - (end - len(part))
            yield part, rows[(rows >= 0) & (rows < len(part))]

    def describe(self, index):
        part, index = self._locate(index)
        return self.parts[part].describe(index)


def mixture_of(open_part: Callable[[str, str, SourceOptions], Source]) -> SourceKind:
    """Returns the `SourceKind` of mixtures; `open_part(kind, split, options)` opens a part."""

    def open_mixture(split: str, options: SourceOptions) -> Mixture:
        opened, alone = [], options._replace(parts=(), weights=None)
        for part in options.parts:
            kind, _, path = part.partition(":")
            opened.append(open_part(kind, split, alone._replace(path=path)))
        return Mixture.join(opened, options.weights, options.class_names)

    return SourceKind(
        "mixture",
        "several sources as one",
        open_mixture,
        reads_slices=True,  # Slices are cut out of each part.
        stands_alone=False,
    )
