"""Identity of a run's data: classes, counts and files, compared at later starts."""

from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.data.class_names import match_classes
from vit_jax.data.sources.base import fingerprint
from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import all_names
from vit_jax.runs.splits import SPOKEN, Splits

KEYS = ("class_names", "images", "data")  # Keys of the manifest.
SHOWN = 5  # Maximum number of classes in a message.
# Descriptions of a fingerprint's values; a difference in one explains those in later ones.
VALUES = {
    "files": "other names or sizes of files",
    "labels": "other labels",
    "chosen images": "other images chosen",
    "fields": "other captions",
    "examples": "other content of images",
}


def differences(saved: Mapping[str, Any], given: Mapping[str, Any], now: str = "now") -> list[str]:
    """Returns the differences between two manifests' data; entries of only one are ignored.

    Args:
      now: the name of the second manifest in the lines.
    """
    before, after = (manifest.get("class_names") or () for manifest in (saved, given))
    other_classes = [*_class_differences(before, after)] if before and after else []
    lines = [*other_classes]
    for name in dict.fromkeys((*saved.get("images", {}), *saved.get("data", {}))):
        difference = _count_difference(saved, given, name, now)
        if not difference and not other_classes:  # Other classes change everything else.
            difference = _content_difference(saved, given, name)
        if difference:
            lines.append(f"{SPOKEN.get(name, name)}: {difference}")
    steps = saved.get("steps")
    if lines and steps is not None and (given_steps := given.get("steps", steps)) != steps:
        lines.append(f"steps: {steps:,}, and {now} {given_steps:,}")
    return lines


def _count_difference(
    saved: Mapping[str, Any], given: Mapping[str, Any], split: str, now: str
) -> str:
    """Returns the numbers of a split's images if they differ; else an empty string."""
    count = saved.get("images", {}).get(split)
    given_count = given.get("images", {}).get(split, count)
    return "" if count == given_count else f"{count:,} images, and {now} {given_count:,}"


def _content_difference(saved: Mapping[str, Any], given: Mapping[str, Any], split: str) -> str:
    """Returns the first value of a split's fingerprint that differs, or an empty string."""
    before, after = (manifest.get("data", {}).get(split, {}) for manifest in (saved, given))
    other = [key for key, value in before.items() if after.get(key, value) != value]
    if not other:
        return ""
    return next((words for key, words in VALUES.items() if key in other), f"other {other[0]}")


def identity_of(splits: Splits) -> dict[str, Any]:
    """Returns a manifest's values that identify the splits of a run, for `differences`."""
    return {
        "class_names": splits.train.class_names,
        "images": {name: len(source) for name, source in splits.named.items()},
        "data": {name: fingerprint(source) for name, source in splits.named.items()},
    }


def _class_differences(before, now) -> Iterator[str]:
    gone, new = (
        [x for x in names if x not in others] for names, others in ((before, now), (now, before))
    )
    for words, names in (("no class", gone), ("a new class", new)):
        if names:
            more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
            yield f"{words} {', '.join(map(repr, names[:SHOWN]))}{more}"
    if not gone and not new and tuple(before) != tuple(now):
        k = next(k for k, (x, y) in enumerate(zip(before, now, strict=False)) if x != y)
        yield f"classes in another order, class {k} is {now[k]!r} and was {before[k]!r}"


def fits_head(saved: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Returns True if a run's head fits other data: common classes keep their indices."""
    classes = saved.get("num_classes")
    if classes != given.get("num_classes"):
        return False
    before, now = (
        all_names(manifest.get("class_names") or (), classes or 0) for manifest in (saved, given)
    )
    try:
        return not before or not now or not match_classes(before, now, "the run").reordered
    except UserError:
        return False
