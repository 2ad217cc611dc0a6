"""Facts about the training of a published model, for its card: data, recipe, results, protocol."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit_jax.checkpoint_crop import checkpoint_crop
from vit_jax.config import OPERATIONAL, base_config, leaves
from vit_jax.evaluation.suites import SUITES
from vit_jax.interop.checkpoint import Checkpoint
from vit_jax.published.weights import all_weights, checkpoint_of
from vit_jax.runs.goodput import read_rows
from vit_jax.runs.predictions import CLASS_FIGURES, metric_in_words
from vit_jax.runs.workdir import METRICS, saved_run

# Names and prefixes of config values that the card's recipe omits, because they do not change the
# training.
_ELSEWHERE = OPERATIONAL | {"log_every", "evaluate_every", "profile", "hang_seconds"}
_SECTIONS = ("sweep.", "checkpoint.")


class RunFacts(NamedTuple):
    """Facts about the training run of a checkpoint, for its card."""

    figures: dict[str, str]  # Formatted results at the checkpoint's step, by name.
    protocol: list[str]  # Sentences about how the results were measured.
    data: str  # A sentence about the training data.
    recipe: dict[str, str]  # Formatted config values that differ from the defaults, by name.
    made_with: str  # A sentence about versions and devices.
    # Model on the Hub from which the run was initialized, `owner/name`; None: the run did not start
    # from such a model.
    base: str | None


def read_facts(workdir: Path, which: str, checkpoint: Checkpoint) -> RunFacts | None:
    """Returns the facts about a checkpoint of a training run; None if it is not from a run.

    Args:
      which: `best`, a step, or empty for the newest checkpoint.
    """
    if checkpoint.step is None or (run := saved_run(workdir)) is None:
        return None
    config, manifest = dict(leaves(run.config)), run.manifest
    rows = read_rows(workdir / METRICS)
    source, base = _source(config), config["finetune.checkpoint"]
    handed_in = " It was passed by a program." if config["data.source"] == "handed_in" else ""
    made_with = "vit_jax" + (f" (commit {manifest['commit']})" if manifest.get("commit") else "")
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    return RunFacts(
        _figures(rows, checkpoint.step),
        _protocol(config, manifest, which, checkpoint, _kept_step(rows, checkpoint.step)),
        f"{source}, split `{config['data.train_split']}`: {manifest['images']['train']:,} images."
        f"{handed_in}",
        _recipe(run.config),
        f"{made_with}, on {manifest['devices']}; {versions}",
        repository(checkpoint_of(base)) if base else None,
    )


def _source(config: dict[str, Any]) -> str:
    """Returns a description of a run's data, without folder names."""
    source = " ".join(without_folders(x) for x in (config["data.source"], config["data.path"]) if x)
    if parts := config["data.parts"]:
        source += f" ({', '.join(map(without_folders, parts))})"
    return source


def _protocol(
    config: dict[str, Any], manifest: dict, which: str, checkpoint: Checkpoint, kept: int | None
) -> list[str]:
    """Returns sentences about the selection and the evaluation of a checkpoint.

    Args:
      kept: result of `_kept_step`.
    """
    chosen_by = "dev" if config["data.dev_split"] is not None else "test"
    best = f", the best of its checkpoints by the {chosen_by} images" if which == "best" else ""
    if kept is not None and kept != checkpoint.step:
        best += f", with the parameters of step {kept:,}, the best by the {chosen_by} images"
    crop = checkpoint_crop(checkpoint, checkpoint.arguments["image_size"])
    sentences = [
        f"After step {checkpoint.step:,} of {manifest['steps']:,}, of one run of seed "
        f"{config['seed']}{best}.",
        f"Preprocessing of an image: {crop}.",
    ]
    images = manifest["images"]
    for name in ("dev", "test"):
        if name in images:
            where = f"split `{config[f'data.{name}_split']}` of {_source(config)}"
            sentences.append(f"{name.capitalize()}: {where}, {images[name]:,} images.")
    return sentences


def _figures(rows: Sequence[dict[str, float]], step: int) -> dict[str, str]:
    """Returns the results of a step (see `_values`), formatted for the card."""
    words = {}
    for key, value in _values(rows, step).items():
        section, _, name = key.partition("/")
        if value is None or name == "images":
            continue
        if section in ("dev", "test"):
            form = ".2%" if name.endswith("accuracy") or name in CLASS_FIGURES else ",.4g"
            words[f"{section} {metric_in_words(name)}"] = format(value, form)
        elif section in SUITES:
            words[f"{SUITES[section].title}: {name}"] = f"{value:.2%}"
    return words


def _values(rows: Sequence[dict[str, float]], step: int) -> dict[str, float]:
    """Returns the logged values of a step by name; of several rows, the last one counts.

    If the step's checkpoint contains the parameters of an earlier step (see `_kept_step`), the
    values of the dev split are from the earlier step.
    """

    def logged(step: int) -> dict[str, float]:
        return {key: x for row in rows if row["step"] == step for key, x in row.items()}

    values, kept = logged(step), _kept_step(rows, step)
    if kept is None:
        return values
    others = {key: x for key, x in values.items() if not key.startswith(("dev/", "kept/"))}
    return others | {key: x for key, x in logged(kept).items() if key.startswith("dev/")}


def _kept_step(rows: Sequence[dict[str, float]], step: int) -> int | None:
    """Returns the earlier step whose parameters the checkpoint of `step` contains, or None.

    If `config.checkpoint.final` is `best`, the run's last checkpoint contains the parameters with
    the best results on the dev split.
    """
    kept = [row["kept/step"] for row in rows if row["step"] == step and "kept/step" in row]
    return int(kept[-1]) if kept else None


def _recipe(config: Any) -> dict[str, str]:
    """Returns the config values that differ from the defaults."""
    default = dict(leaves(base_config()))
    return {
        key: without_folders(str(value))
        for key, value in leaves(config)
        if value != default[key] and key not in _ELSEWHERE and not key.startswith(_SECTIONS)
    }


def repository(source: str) -> str | None:
    """Returns the `owner/name` in `hf://owner/name`; None for other sources."""
    found = re.fullmatch(r"hf://([^@]+)(@.*)?", source)
    return found[1] if found else None


def licence_of(name: str) -> str | None:
    """Returns the licence of published weights; None: unknown."""
    return next((weights.licence for weights in all_weights() if weights.repository == name), None)


def without_folders(text: str) -> str:
    """Removes folders from the paths in a text, because they are private."""
    start = r"(?:(?<=^)|(?<=[\s:=,'\"]))(?<!hf:)"
    folders = r"(?:gs://|s3://|~/|\.{0,2}/)(?:[^\s:=,'\"/]*/)*(?=[^\s:=,'\"/])"
    return re.sub(start + folders, "", text)
