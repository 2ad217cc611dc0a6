"""Identity of a run's data: class names, numbers of images, and fingerprints of the splits.

When a run is resumed, the identity of its data is compared with the stored identity.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.data.class_names import match_classes
from vit_jax.data.sources.base import fingerprint
from vit_jax.data.sources.slices import overlap
from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import all_names
from vit_jax.options.run import RunOptions
from vit_jax.runs.splits import MANY, SPOKEN, Splits
from vit_jax.training.objectives import is_handed_in, objective_of

KEYS = ("class_names", "images", "data")  # Keys of the manifest that identify the data.
SHOWN = 5  # Maximum number of classes in a message.
# Messages about values that differ between two fingerprints of a split. If a value differs, later
# values usually differ for the same reason. Therefore only the first difference is reported.
VALUES = {
    "files": "other names or sizes of files",
    "labels": "other labels",
    "chosen images": "other images chosen",
    "fields": "other captions",
    "examples": "other content of images",
}


def differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], now: str = "now"
) -> list[str]:
    """Returns lines that describe the differences between the data of two manifests.

    Entries that only one of the manifests has are ignored. `now` names the second one in the lines.
    """
    before, after = (manifest.get("class_names") or () for manifest in (saved, current))
    other_classes = [*_class_differences(before, after)] if before and after else []
    lines = [*other_classes]
    for name in dict.fromkeys((*saved.get("images", {}), *saved.get("data", {}))):
        difference = _count_difference(saved, current, name, now)
        if not difference and not other_classes:  # If classes differ, the content differs, too.
            difference = _content_difference(saved, current, name)
        if difference:
            lines.append(f"{SPOKEN.get(name, name)}: {difference}")
    steps = saved.get("steps")
    if lines and steps is not None and (current_steps := current.get("steps", steps)) != steps:
        lines.append(f"steps: {steps:,}, and {now} {current_steps:,}")
    return lines


def _count_difference(
    saved: Mapping[str, Any], current: Mapping[str, Any], split: str, now: str
) -> str:
    """Describes different numbers of images in a split; empty if the numbers are equal."""
    count = saved.get("images", {}).get(split)
    current_count = current.get("images", {}).get(split, count)
    return "" if count == current_count else f"{count:,} images, and {now} {current_count:,}"


def _content_difference(saved: Mapping[str, Any], current: Mapping[str, Any], split: str) -> str:
    """Describes the first difference of a split's fingerprints; empty if they are equal."""
    before, after = (manifest.get("data", {}).get(split, {}) for manifest in (saved, current))
    other = [key for key, value in before.items() if after.get(key, value) != value]
    if not other:
        return ""
    return next((words for key, words in VALUES.items() if key in other), f"other {other[0]}")


def leak_warning(
    config: RunOptions,
    data: Mapping[str, Any],
    earlier: RunOptions,
    manifest: Mapping[str, Any],
) -> str | None:
    """Returns a warning if an earlier run may have been trained on images that this run evaluates.

    If images are added to a folder, its slices contain other images than before. So a run that
    starts from an earlier run's checkpoint may evaluate images on which that run was trained.

    Args:
      data: fingerprints of this run's splits, by name.
      earlier: config of the run that wrote the checkpoint.
      manifest: manifest of that run.
    """
    known = manifest.get("data", {})
    # If both runs have the same training images, this run's own splits cannot leak either.
    if data["train"] == known.get("train") or not _same_images(config, earlier):
        return None
    if not _learned_labels(earlier, manifest):
        return None
    held_out = [known.get("dev"), known.get("test")]
    splits = {"dev": config.data.dev_split, "test": config.data.test_split}
    leaking = [
        f"{SPOKEN[name]} images ({split})"
        for name, split in splits.items()
        if split and data[name] not in held_out and _may_share(split, config, earlier)
    ]
    if not leaking:
        return None
    source = earlier.finetune.checkpoint
    again = f"from {source}, as the run of the checkpoint did" if source else "from other weights"
    return (
        f"warning: some of the {' and '.join(leaking)} may be training images of the run "
        f"{config.finetune.checkpoint}, as the data or the splits have changed since; the metrics "
        f"would then be too good. Train on all images {again}, keep test images in a folder of "
        "their own, such as test/, or give data.slices='hashed' and the same data.groups to both "
        "runs"
    )


def _learned_labels(earlier: RunOptions, manifest: Mapping[str, Any]) -> bool:
    """Returns True if a saved run was trained on labels."""
    name = earlier.objective.name
    if is_handed_in(name):  # The class of the objective is unknown here.
        return bool(manifest.get("class_names"))
    return objective_of(name).labels


def _same_images(config: RunOptions, earlier: RunOptions) -> bool:
    """Returns True if two runs read the same files and do not select disjoint classes."""
    now, before = config.data, earlier.data
    if now.classes and before.classes and not set(now.classes) & set(before.classes):
        return False
    paths = [os.path.abspath(data.path) for data in (now, before)]
    return bool(now.path) and now.source == before.source and paths[0] == paths[1]


def _may_share(split: str, config: RunOptions, earlier: RunOptions) -> bool:
    """Returns True if a run's split may contain training images of an earlier run.

    Images may move to another slice when others are added. In hashed slices of the same groups they
    stay.
    """
    train, now, before = earlier.data.train_split, config.data, earlier.data
    if now.slices == before.slices == "hashed" and now.groups == before.groups:
        return overlap(split, train, MANY)
    return bool(_names(split) & _names(train))


def _names(split: str) -> set[str]:
    """Returns the names of splits without slices: `train` and `val` for `train[:90%]+val`."""
    return {part.split("[")[0] for part in split.split("+")}


def identity_of(splits: Splits) -> dict[str, Any]:
    """Returns the data identity that a run's manifest stores, for a comparison by `differences`."""
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


def fits_head(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Returns True if a run's head can be used for other data.

    The numbers of classes must be equal, and common classes must have the same index in both.
    """
    classes = saved.get("num_classes")
    if classes != current.get("num_classes"):
        return False
    before, now = (
        all_names(manifest.get("class_names") or (), classes or 0) for manifest in (saved, current)
    )
    try:
        return not before or not now or not match_classes(before, now, "the run").reordered
    except UserError:
        return False
