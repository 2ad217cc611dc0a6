"""Runs evaluation suites for a checkpoint. Each result is saved as soon as it is computed."""

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from vit_jax.checkpoint_crop import checkpoint_crop
from vit_jax.data.preprocess import TestCrop
from vit_jax.dense import PREDICTORS, load_segmenter
from vit_jax.errors import UserError, nearest
from vit_jax.evaluation.features import split_and_placed, transfer_crop
from vit_jax.evaluation.flags_in_errors import naming_flags
from vit_jax.evaluation.results import Results, in_words
from vit_jax.evaluation.suite import (
    COMPARED_EXAMPLES,
    DenseHeads,
    Impossible,
    Measurement,
    Row,
    Stopped,
    Subject,
    Suite,
    digest_of,
)
from vit_jax.evaluation.suites import SUITES
from vit_jax.evaluation.text_encoder import TextEncoder
from vit_jax.image_text import open_text_part, towers_place
from vit_jax.interop.checkpoint import Checkpoint
from vit_jax.interop.dense import TASKS, with_head
from vit_jax.interop.open import open_checkpoint
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.load import build_model
from vit_jax.options.data import DataOptions
from vit_jax.options.run import RunOptions
from vit_jax.parallel.mesh import make_mesh
from vit_jax.paths import absolute, is_url
from vit_jax.runs.loop import train
from vit_jax.runs.suite_pages import write_suite_page
from vit_jax.runs.warm_start import fingerprint_of
from vit_jax.runs.workdir import place_of, saved_run


def run_suites(
    checkpoint: str | Path,
    names: list[str],
    out: str | Path,
    *,
    options: Mapping[str, Any] | None = None,
    image_size: int | None = None,
    batch_size: int = 128,
    workers: int | None = None,
    log: Callable[[str], None] = print,
) -> Results:
    """Evaluates a checkpoint with suites.

    Results in `out` are reused if the checkpoint (its step and its content) and the data have not
    changed. The log names reused results.

    Args:
      checkpoint: a workdir, a file or `hf://owner/name`, as in `load_model`.
      names: names of suites, or `all`.
      out: a folder for `results.json`, `results.md` and `results.png`.
      options: values of the suites' options by name. If a data set is missing on this machine, its
        row in the table of results explains how to get the data set.
      image_size: image size in pixels; None: the checkpoint's image size (384 for VTAB).
      batch_size: batch size of all devices together.
      workers: number of processes that decode images; None: it is chosen by the numbers of cores
        and images.

    Raises:
      UserError: the checkpoint or a suite does not exist, or `out` contains other results.
    """
    chosen = chosen_suites(names)
    url = str(checkpoint).startswith("hf://") or is_url(checkpoint)
    # Paths are stored as absolute paths, since a later call may have another current folder.
    name = str(checkpoint) if url else str(absolute(checkpoint))
    opened = open_checkpoint(checkpoint, image_size)
    described = opened.describe()
    log(described)
    version = version_of(opened)
    results = Results(absolute(out), name, described.split(": ")[0], version)
    if results.outdated:
        log(f"note: {results.outdated}")

    def model():
        changes = {"image_size": image_size} if image_size else {}
        return build_model(opened, log=lambda line: None, **changes)

    def dense(task: str):
        loaded = with_head(TASKS[task], opened, model())
        loaded.predictor = PREDICTORS[task](subject.test_crop)
        return loaded

    def probe(config: RunOptions, folder: str):
        workdir = results.folder / f"{folder}-{version['content']}"
        if not train(config, workdir):  # A signal stopped the run, which has saved a checkpoint.
            raise Stopped
        return load_segmenter(workdir, log=lambda line: None)

    mesh, data_options = make_mesh(), data_options_of(checkpoint, opened)
    subject = Subject(
        str(checkpoint),
        mesh,
        lambda: split_and_placed(model(), mesh),
        functools.partial(frozen_crop, opened, image_size),
        functools.partial(predicted_crop, opened, image_size),
        lambda: text_encoder(checkpoint, opened, mesh),
        log=log,
        finetune=lambda config, folder: train(
            config, results.folder / f"{folder}-{version['content']}"
        ),
        dense=DenseHeads(load=dense, probe=probe, **dense_facts(opened, data_options)),
        num_classes=opened.options.num_classes,
        class_names=opened.class_names,
        batch_size=batch_size,
        workers=workers,
    )
    if data_options:
        subject.caption_key = data_options.caption_key
    subject.on_outputs = lambda outputs: log(f"page: {write_suite_page(results.folder, outputs)}")
    given = {"image_size": image_size} | dict(options or {})
    values = {suite.name: {"image_size": None} | suite.defaults() | given for suite in chosen}
    for suite in chosen:
        settings = {"image_size": image_size} | suite.settings(subject, values[suite.name])
        results.begin(suite.name, settings)
    for suite in chosen:
        with naming_flags():
            measurements = suite.measurements(subject, values[suite.name])
        for measurement in measurements:
            attempt(results, suite, measurement, subject)
    return results


def data_options_of(source: str | Path, opened: Checkpoint) -> DataOptions | None:
    """Returns the data options of a run; None for a checkpoint that is not a run."""
    saved = None if opened.step is None else saved_run(place_of(source)[0])
    return saved.config.data if saved else None


def dense_facts(opened: Checkpoint, data_options: DataOptions | None) -> dict[str, Any]:
    """Returns `task` and, for a run, `depth_scale` of the checkpoint's `DenseHeads`."""
    task = opened.objective.name if opened.objective else None
    return {"task": task} | ({"depth_scale": data_options.depth_scale} if data_options else {})


def text_encoder(source: str | Path, opened: Checkpoint, mesh: Mesh) -> TextEncoder:
    """Returns the text encoder of a checkpoint; raises UserError if it has none."""
    text_part = open_text_part(towers_place(source), opened)
    return TextEncoder(
        text_part.tokenizer,
        text_part.probabilities,
        mesh,
        lambda: split_and_placed(text_part.tower, mesh),
        lambda tower: tower,
        lambda params: (math.exp(text_part.logit_scale), text_part.logit_bias),
    )


def chosen_suites(names: list[str]) -> list[Suite]:
    """Returns the suites with these names, in display order; raises UserError for unknown names."""
    for name in names:
        if name not in (*SUITES, "all"):
            raise UserError(f"unknown suite {name!r}; {nearest(name, [*SUITES, 'all'])}")
    return [suite for name, suite in SUITES.items() if name in names or "all" in names]


def version_of(opened: Checkpoint) -> dict[str, int | str | None]:
    """Returns the version of a checkpoint: its step, and a hash of its parameters and its model."""
    arrays = {path: functools.partial(opened.read, path) for path in opened.shapes}
    objective = opened.objective
    # The hash of the parameters includes the head of the run's objective, if the head predicts
    # classes, depths or objects.
    if (
        objective is not None
        and objective.shapes is not None
        and (objective.class_names or objective.name in TASKS)
    ):
        arrays |= {
            f"objective/{path}": read
            for path, read in objective.sources(objective.shapes()).items()
        }
    params = fingerprint_of((path, arrays[path]()) for path in sorted(arrays))
    model = zlib.crc32(repr(opened.options).encode())
    return {"step": opened.step, "content": f"{params}{model:08x}"}


def digests_of_data(measurement: Measurement) -> tuple[dict[str, str], str]:
    """Returns digests (hashes) of the data by row name, and a text why digests are missing.

    A row whose data cannot be opened has no digest.
    """
    digests, failures = {}, {}
    for name in measurement.names:
        try:
            with naming_flags():
                digests[name] = digest_of(measurement.identify(name))
        except UserError as error:
            failures[str(error)] = None
    return digests, "; ".join(failures)


def attempt(results: Results, suite: Suite, measurement: Measurement, subject: Subject) -> None:
    """Computes rows of a suite's table that are missing in `results`, or whose data have changed.

    A row with an earlier result is kept if its data cannot be opened now. If a row cannot be
    computed, the row is added without a metric, and its note contains the reason.
    """
    digests, failure = digests_of_data(measurement)
    reused, changed = [], []
    unknown = []  # Rows with unavailable data.
    same = f"the same checkpoint, names and sizes of files, and {COMPARED_EXAMPLES} examples"
    for name in measurement.names:
        if not results.has(suite.name, name):
            continue
        if name not in digests:
            unknown.append(name)
        elif digests[name] in (None, results.data_of(suite.name, name)):
            reused.append(name)
        else:
            changed.append(name)
    for names, words in (
        (changed, "recomputed, since the data have changed"),
        (reused, f"reused from {results.folder}: {same}"),
        (unknown, f"reused from {results.folder}, with no data to compare: {failure}"),
    ):
        if names:
            subject.log(f"{suite.name}: {', '.join(names)}: {words}")
    missing = [name for name in measurement.names if name not in (*reused, *unknown)]
    if not missing:
        return
    subject.log(f"== {suite.name}: {missing[0]}")
    rows = measured_rows(suite, measurement, subject, missing)
    results.put(*rows, data=digests)
    for line in in_words(rows):
        subject.log(line)


def measured_rows(
    suite: Suite, measurement: Measurement, subject: Subject, names: list[str]
) -> list[Row]:
    """Computes rows of a suite's table.

    A row that cannot be computed has no metric, and its note contains the reason.
    """
    impossible = []
    try:
        try:
            with naming_flags():
                opened = measurement.open(names)
        except Impossible as error:
            impossible = [Row(suite.name, name, note=str(error)) for name in error.names]
            names = [name for name in names if name not in error.names]
            with naming_flags():
                opened = measurement.open(names) if names else None
        rows = [*measurement.measure(subject, opened)] if names else []
    except UserError as error:
        rows = [Row(suite.name, name, note=str(error)) for name in names]
    except Stopped:
        raise SystemExit from None
    return [*rows, *impossible]


def square_size(opened, image_size: int | None) -> int:
    """Returns the image size in pixels (height = width) that suites use.

    Raises:
      UserError: the model does not accept square images.
    """
    return transfer_crop(image_size or opened.options.image_size).size


def predicted_crop(opened, image_size: int | None) -> TestCrop:
    """Returns a checkpoint's evaluation transform; by default, the image becomes a square."""
    whole = Preprocessing("square", 1, "bilinear")
    return checkpoint_crop(opened, square_size(opened, image_size), default=whole)


def frozen_crop(opened, image_size: int | None) -> TestCrop:
    """Returns the evaluation transform for features of the frozen model.

    For a checkpoint of another library, it is the preprocessing that the checkpoint contains. For a
    vit_jax run, and for a checkpoint without preprocessing, it is the transform of the few-shot
    protocol. Evaluations during training also use the transform of the few-shot protocol.
    """
    size = square_size(opened, image_size)
    crop = checkpoint_crop(opened, size)
    if opened.mapped and opened.preprocessing:
        return crop
    return transfer_crop(
        size, mode=crop.mode, interpolation=crop.interpolation, background=crop.background
    )
