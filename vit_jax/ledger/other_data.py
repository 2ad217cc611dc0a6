"""Replaces data sets of an experiment's runs by the user's: --data=jft=folder:/data/mine."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.config import value_at
from vit_jax.data.sources import SOURCES, DataSet, data_set, open_source
from vit_jax.errors import UserError
from vit_jax.options.run import RunOptions
from vit_jax.runs.splits import open_splits

FORM = "NAME=KIND:PATH@TRAIN,TEST"
# Instructions for data sets that TFDS does not provide.
TO_GET = {
    "jft": "JFT-300M was never published: any large set of labelled images may stand for it",
    "imagenet21k": "get ImageNet-21k from https://image-net.org, and python -m vit_jax.prepare "
    "makes a data set of it (docs/preparing_data.md)",
}
KEYS = tuple(f"data.{key}" for key in ("train_split", "dev_split", "test_split"))


class OtherData(NamedTuple):
    """A user's data set that replaces a data set of an experiment, as options of `data`."""

    kind: str  # Value of `data.source`.
    path: str
    # Names of the training and the test split; None: as in the replaced data set.
    splits: tuple[str, str] | None = None
    label_key: str = "label"
    num_classes: int | None = None

    @property
    def name(self) -> str:
        """Name of the data set in metrics, such as `mine` in `fewshot/mine/5`."""
        return SOURCES[self.kind].name_of(self.path)


def read_data(texts: Sequence[str]) -> dict[str, OtherData]:
    """Parses values of `--data`; returns the user's data sets by the name of the replaced data set.

    Example: `jft=tfds:/data/mine@train,val,label_key=labels,num_classes=90`.

    Raises:
      UserError: a value is malformed, or a name occurs twice.
    """
    found: dict[str, OtherData] = {}
    kinds = [kind.name for kind in SOURCES.values() if kind.path]
    pattern = (
        r"([^=]+)=(\w+):([^@,]+)(?:@([^@,=]+),([^@,=]+))?"
        r"(?:,label_key=([^,]+))?(?:,num_classes=(\d+))?"
    )
    for text in texts:
        match = re.fullmatch(pattern, text)
        if not match or match[2] not in kinds:
            raise UserError(
                f"cannot read --data={text}: write {FORM}, such as "
                f"jft=folder:/data/mine@train,val; kinds are {', '.join(kinds)}; label_key=KEY, "
                "then num_classes=N, may follow after commas"
            )
        if match[1] in found:
            raise UserError(f"--data has {match[1]} twice")
        splits = (match[4], match[5]) if match[4] else None
        label_key, classes = match[6] or "label", int(match[7]) if match[7] else None
        found[match[1]] = OtherData(match[2], match[3], splits, label_key, classes)
    return found


def names_of(config: RunOptions) -> list[str]:
    """Returns the names of all data sets that a config reads, such as `jft` or `vtab/dtd`."""
    read = [
        (config.data.source, config.data.path),
        *((each.kind, each.path) for each in _sets(config)),
    ]
    return list(dict.fromkeys(_name(*each) for each in read))


def _sets(config: RunOptions) -> list[DataSet]:
    """Returns the data sets of a config's few-shot and k-NN evaluations."""
    return [
        data_set(text)
        for suite in (config.fewshot, config.knn)
        if suite.every
        for text in suite.sets
    ]


def open_all(config: RunOptions, replaced: Sequence[str] = ()) -> None:
    """Opens the data sets of a run with this config to check them, some `replaced` by `--data`.

    Raises:
      UserError: data cannot be opened; the message describes how to get or replace them.
    """
    name = _name(config.data.source, config.data.path)
    try:
        open_splits(config)
        for each in _sets(config):
            name = _name(each.kind, each.path)
            for split in (each.train_split, each.test_split):
                open_source(each.kind, split, path=each.path)
    except UserError as error:
        if name in replaced:
            raise
        words = [str(error), *([TO_GET[name]] if name in TO_GET else [])]
        words.append(f"for other data in its place: --data={name}=KIND:PATH")
        raise UserError("; ".join(words)) from error


def _name(kind: str, path: str) -> str:
    name = SOURCES[kind].name_of(path) or kind
    return f"{kind}/{name}" if kind == "vtab" else name


def replaced(config: RunOptions, data: Mapping[str, OtherData]) -> dict[str, Any]:
    """Returns the config values, by dotted key, that must change to use the user's data sets.

    Splits keep their slices: if `all` replaces `train`, `train[:99%]` becomes `all[:99%]`. `data`
    has the user's data sets by the name of the data set that they replace.
    """
    values: dict[str, Any] = {}
    if (other := data.get(_name(config.data.source, config.data.path))) is not None:
        values = {"data.source": other.kind, "data.path": other.path}
        values |= {"data.label_key": other.label_key, "data.num_classes": other.num_classes}
        names = _split_names(other, config.data.train_split, config.data.test_split)
        splits = {key: value_at(config, key) for key in KEYS}
        values |= {key: _renamed(split, names) for key, split in splits.items() if split}
    for key in ("fewshot.sets", "knn.sets"):
        sets = tuple(_suite_set(text, data) for text in value_at(config, key))
        values |= {key: sets} if sets != value_at(config, key) else {}
    return values


def _split_names(other: OtherData, train: str, test: str) -> dict[str, str]:
    """Returns the user's split for each split that it replaces, such as `{"train": "all"}`."""
    if not other.splits:
        return {}
    return {test.partition("[")[0]: other.splits[1]} | {train.partition("[")[0]: other.splits[0]}


def _renamed(split: str, names: Mapping[str, str]) -> str:
    """Renames the splits in an expression such as `train[:90%]+test`, and keeps the slices."""
    parts = (part.partition("[") for part in split.split("+"))
    return "+".join(names.get(name, name) + bracket + rest for name, bracket, rest in parts)


def _suite_set(text: str, data: Mapping[str, OtherData]) -> str:
    """Returns a data set of `fewshot.sets` or `knn.sets`, or the data set that replaces it."""
    described = data_set(text)
    if (other := data.get(_name(described.kind, described.path))) is None:
        return text
    names = _split_names(other, described.train_split, described.test_split)
    train, test = (
        _renamed(split, names) for split in (described.train_split, described.test_split)
    )
    return f"{other.kind}:{other.path}@{train},{test}"


def check_names(data: Mapping[str, OtherData], used: Sequence[str]) -> None:
    """Raises UserError if the flag `--data` replaces a data set that no run reads."""
    for name in data:
        if name not in used:
            raise UserError(f"--data={name}=...: no run reads {name!r}; they read {in_words(used)}")


def in_words(names: Sequence[str]) -> str:
    """Formats names of data sets in one line. Tasks of VTAB-1k are only counted, not listed."""
    tasks = [name for name in names if name.startswith("vtab/")]
    rest = [name for name in names if name not in tasks]
    return ", ".join([*rest, *([f"vtab/TASK ({len(tasks)} tasks)"] if tasks else [])])
