"""The meaning that the config of a run had when the run began, where its text means something else today.

A workdir's manifest has the number of its format; one without is of format 1. Runs of an earlier format go
on with the meaning they began with, spelled out in today's values, or are refused in one line.
"""

import json
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import VALUES, from_json, leaves
from vit_jax.data.sources import data_set
from vit_jax.errors import UserError

FORMAT = 5


# Until format 4 fine-tuning went on with these of the checkpoint's run; values by which they do nothing.
CARRIED = {"attention_dropout": 0.0, "uniform_depth": False, "depth_by": "image", "rope_rescale": 1.0}


def saved_config(text: str, format: int, model: Mapping[str, Any]) -> ConfigDict:
    """The config of a run, in today's values.

    Args:
      text: of the run's `config.json`.
      format: of its manifest.
      model: the model's arguments, of its manifest.
    """
    config = from_json(text)
    if format < 2:
        config.update_from_flattened_dict(_format_1(config))
    if format < 3:
        config.update_from_flattened_dict(_format_2(config))
    if format < 4:
        config.update_from_flattened_dict(_format_3(config))
    if format < 5:
        config.update_from_flattened_dict(_format_4(config, model))
    return config


def _format_1(config: ConfigDict) -> dict[str, Any]:
    """The values that a config's text meant in format 1, where that differs."""
    meant = {"data.background": "none"}
    if config.data.crop == "inception":
        meant["data.crop"] = "random_resized"
    if config.optimizer.name == "adafactor":
        meant |= {"optimizer.clip_update": 1.0, "optimizer.clip_update_of": "array"}
    if config.objective.name == "mae":
        meant["objective.decoder_position"] = "sincos2d"
    return meant


def _format_2(config: ConfigDict) -> dict[str, Any]:
    """The values that a config's text meant until format 2, where that differs."""
    starts = config.finetune.checkpoint is not None and config.objective.name in ("mae", "masked_patch")
    return {"finetune.objective": "new"} if starts else {}


def _format_3(config: ConfigDict) -> dict[str, Any]:
    """The values that a config's text meant until format 3, where that differs."""
    starts = config.finetune.checkpoint is not None and config.objective.name == "dino"
    return {"finetune.objective": "new"} if starts else {}


def _format_4(config: ConfigDict, model: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a config's text meant until format 4, where that differs."""
    meant = {}
    if config.objective.name == "beitv2" and config.objective.aggregate_from is None:
        meant["objective.aggregate_from"] = 3 * model["depth"] // 4
    if config.finetune.checkpoint in (None, "handed_in"):  # A model that is handed in keeps its own.
        return meant
    return meant | {
        f"model.{name}": model[name]
        for name, idle in CARRIED.items()
        if config.model[name] is None and model.get(name, idle) != idle
    }


def settled(
    config: ConfigDict, text: str, format: int, model: Mapping[str, Any]
) -> tuple[ConfigDict, list[str]]:
    """The config with which a run goes on that began with the text `text`, and what differs from `config`.

    In an earlier format what has come since keeps the meaning that the run began with, whatever a recipe
    says of it today.

    Raises:
      UserError: the run is of a later format, or what it trained on cannot be had any more.
    """
    if format > FORMAT:
        raise UserError(f"the run is of format {format}, and this vit_jax knows {FORMAT}: use a newer one")
    if format == FORMAT:
        return config, []
    if format < 2:
        _check_what_is_gone(from_json(text))
    saved, given = dict(leaves(saved_config(text, format, model))), dict(leaves(config))
    known = dict(leaves(ConfigDict(json.loads(text))))
    kept = {
        key: saved[key]
        for key, value in VALUES.items()
        if not value.operational
        and given[key] != saved[key]
        and (key not in known or known[key] == given[key])  # New since then, or the same word.
    }
    config = config.copy_and_resolve_references().unlock()
    config.update_from_flattened_dict(kept)
    return config.lock(), [f"config.{key} is {value!r}" for key, value in kept.items()]


def _check_what_is_gone(config: ConfigDict) -> None:
    """Raises UserError where no value of today makes what a config of format 1 made."""
    anew = "start it anew in another --workdir (its checkpoints load as ever: config.finetune.checkpoint)"
    if config.augment.erasing:
        raise UserError(
            "this run began when random erasing drew other rectangles than today: config.augment.erasing is "
            f"{config.augment.erasing:g}; {anew}"
        )
    kinds = {config.data.source, *(part.partition(":")[0] for part in config.data.parts or ())}
    splits = [
        (kinds, "data.train_split", config.data.train_split),
        (kinds, "data.test_split", config.data.test_split),
    ]
    for text in config.fewshot.sets if config.fewshot.every else ():
        found = data_set(text)
        splits += [({found.kind}, "fewshot.sets", split) for split in (found.train_split, found.test_split)]
    for kinds, key, split in splits:
        sliced = "[" in split and kinds & {"folder", "array_record", "synthetic"}
        if sliced or (split == "all" and "folder" in kinds):
            raise UserError(
                f"this run began when slices held other images than today: config.{key} is {split!r}; {anew}"
            )
