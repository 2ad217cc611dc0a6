"""A run from its config to its report.

One turn of the loop, in this order: step, take the next batch, log, evaluate, save. A run that is
stopped anywhere and started again on the same workdir goes on from its newest checkpoint and
ends with the same bits: batches and random numbers are functions of the seed and the step.
"""

import contextlib
import dataclasses
import math
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
from clu import parameter_overview
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.config import check_policy, profiled_steps, rand_policy
from vit_jax.data.pipeline import SkipLog, decoders, training_batches
from vit_jax.data.preprocess import TrainCrop
from vit_jax.data.randaugment import host_augmentation, resolve
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.data.timm_augment import RandPolicy
from vit_jax.data.views import Picture, pictures_of
from vit_jax.errors import UserError
from vit_jax.evaluation.fewshot import FewShot, in_lines, open_tasks
from vit_jax.parallel.mesh import check_batch, local_rows, make_mesh
from vit_jax.parallel.peers import Peers
from vit_jax.parallel.process_settings import keep_freed_memory, share_interpreter
from vit_jax.parallel.sharding import path_name
from vit_jax.progress import duration
from vit_jax.runs.checkpoints import Checkpoints
from vit_jax.runs.console import Console, MetricWriter
from vit_jax.runs.device_feed import Feed
from vit_jax.runs.evaluator import Evaluator
from vit_jax.runs.goodput import Ledger, read_rows
from vit_jax.runs.memory_check import MemoryCheck
from vit_jax.runs.preemption import StopSignal
from vit_jax.runs.profiler_trace import Trace
from vit_jax.runs.report import write_report
from vit_jax.runs.report_pictures import attention_figures, kept_pictures, reconstruction_picture
from vit_jax.runs.splits import SPOKEN, notes, open_splits
from vit_jax.runs.training_log import TrainLog
from vit_jax.runs.warm_start import Origin, find_origin
from vit_jax.runs.watchdog import Watchdog
from vit_jax.runs.workdir import (
    CHECKPOINTS,
    METRICS,
    RECONSTRUCTIONS,
    check_shared,
    claim,
    make_manifest,
    settled_config,
)
from vit_jax.runs.workdir_lock import Lock
from vit_jax.training.lora import objective_weights
from vit_jax.training.objectives import objective_of
from vit_jax.training.objectives.objective import in_format
from vit_jax.training.program import Program, make_program
from vit_jax.training.step import Metrics, State

Figures = dict[str, dict[str, float]]  # Of an evaluation, by split.


def train(
    config: ConfigDict, workdir: Path, peers: Peers | None = None, started: float | None = None
) -> dict[str, float]:
    """Trains to the end, or until SIGTERM or SIGINT, and writes all of it into `workdir`.

    Args:
      config: checked by `vit_jax.config.check`.
      workdir: new, empty, or of an earlier start with the same config, which is continued.
      peers: the run's processes, where there are several (`vit_jax.parallel.distributed.start`).
      started: `time.time()` when the command began, for the log.

    Returns:
      The last evaluation's figures of the test images; empty when the run was stopped before its end.

    Raises:
      UserError: the config does not fit the data, the devices or the workdir; another run is in the
        workdir, or it is deleted; the loss is no longer finite; the disk or a device's memory is full; too
        many images are unreadable.
    """
    with Watchdog(config.hang_seconds) as watchdog, contextlib.ExitStack() as held:
        return _train(config, workdir, peers or Peers(), started or time.time(), watchdog, held)


def _train(
    config: ConfigDict,
    workdir: Path,
    peers: Peers,
    started: float,
    watchdog: Watchdog,
    held: contextlib.ExitStack,
) -> dict[str, float]:
    """`train`, with what is entered first and left last: `held` gets the workdir."""
    share_interpreter()
    keep_freed_memory()
    watchdog.begins("finding the devices")
    mesh = make_mesh(config.mesh)
    check_batch(mesh, config.batch_size, config.micro_batches)
    config, kept = settled_config(workdir, config)
    watchdog.begins("looking through the data sets")
    splits = open_splits(config)
    train_source = splits.train
    if peers.count > 1:
        for name, source in splits.named.items():
            peers.agree(f"the {SPOKEN[name]} data", fingerprint(source))
    watchdog.begins("looking through the few-shot data sets")
    few_shot_tasks = open_tasks(config, peers)
    num_classes, supervised = class_count(config, train_source), objective_of(config).labels
    steps = step_count(config, len(train_source))
    watchdog.begins("opening the checkpoint to start from")
    origin = find_origin(config, num_classes)
    watchdog.begins("making the program")

    def program_of(config: ConfigDict, mesh: Mesh, origin: Origin) -> Program:
        return make_program(config, num_classes=num_classes, steps=steps, mesh=mesh, build=origin.build)

    def another(config: ConfigDict) -> Program:
        return program_of(config, make_mesh(config.mesh), find_origin(config, num_classes))

    program = program_of(config, mesh, origin)
    memory = MemoryCheck(program, config, train_source.max_labels, another)
    held.enter_context(_out_of_memory_in_words(memory))

    leader = jax.process_index() == 0
    memory.check(print if leader else lambda line: None)
    images = {name: len(source) for name, source in splits.named.items()}
    names = train_source.class_names if supervised else ()
    manifest = make_manifest(steps, names, images, origin.model, origin.arguments, origin.interpolation)
    watchdog.begins(f"taking the workdir {workdir}")
    # One process holds it for all, and sees whether it is still there.
    lock = held.enter_context(claim(workdir, config, manifest)) if leader else None
    held.enter_context(_lost_workdir_in_words(lock))
    config = with_images_of(config, origin)
    check_shared(workdir, peers)
    console = Console(workdir / "log.txt" if leader else None)
    if kept:
        console.say(
            f"note: this run began with an earlier vit_jax, and goes on as it began: {', '.join(kept)}"
        )
    console.say(describe(config, manifest, program, origin))
    for note in notes(config, splits):
        console.say(note)
    if len(train_source) < config.batch_size:
        console.say(
            f"note: a batch of {config.batch_size} shows images of {len(train_source)} more than once"
        )
    warn = console.say if leader else print  # Each process names the images that it cannot read.
    evaluate = Evaluator(program, splits.named, config, warn, pictures(config))
    shardings = jax.tree.map(lambda x: x.sharding, program.state["params"])
    few_shot = FewShot(config, few_shot_tasks, program.graphdef, shardings, mesh, warn)

    with contextlib.ExitStack() as resources:
        stop = resources.enter_context(StopSignal())
        stacks = workdir / f"stacks-{jax.process_index()}.txt"
        watchdog.report_to(stacks, warn)
        watchdog.begins("reading the newest checkpoint")
        kept = config.checkpoint
        checkpoints = resources.enter_context(
            Checkpoints(workdir / CHECKPOINTS, kept.keep_last, kept.keep_every, kept.keep_best, console.say)
        )
        if restored := checkpoints.restore_newest(as_items(program.state, program.metrics)):
            first_step, (state, metrics) = restored[0], from_items(restored[1])
            console.say(f"continuing from {checkpoints.folder / str(first_step)}")
        else:
            watchdog.begins("making the first parameters")
            first_step, params = 0, origin.read()
            if peers.count > 1:
                leaves = jax.tree.leaves_with_path(params)
                peers.agree("the checkpoint to start from", {path_name(k): zlib.crc32(x) for k, x in leaves})
            state, metrics = program.initial_state(config.seed, params), program.initial_metrics()
        zero_metrics = program.initial_metrics()
        ledger = Ledger(started, read_rows(workdir / METRICS), first_step)
        writer = MetricWriter(workdir, first_step) if leader else None
        log = TrainLog(
            steps=steps,
            batch_size=config.batch_size,
            images=len(train_source),
            flops=program.flops,
            schedule=program.schedule,
            checkpoints=checkpoints,
            console=console,
            writer=writer,
            ledger=ledger,
            metrics=program.abstract_objective().metrics,
            skipped=int(metrics["skipped"]["total"]),
            max_skipped=config.max_skipped_steps,
        )
        trace = resources.enter_context(Trace(profiled_steps(config), workdir / "profile", console.say))
        feed = resources.enter_context(
            contextlib.closing(open_feed(config, train_source, first_step, warn, mesh))
        )
        watchdog.begins("reading the first batch")
        batch = feed.take() if first_step < steps else None

        def evaluation(step: int) -> Figures | None:
            """Figures of the newest parameters, written; None when a signal came before they were.

            They are of the split that chooses, and at the end of the test images too.
            """

            def go_on():
                watchdog.done("a batch of the evaluation")
                return not stop.reached()

            ledger.enter("evaluate")
            watchdog.begins("evaluating")
            judged = program.judged(state)
            figures, row = {}, {}
            for split in dict.fromkeys([splits.chosen_by] + ["test"] * (step == steps)):
                if (found := evaluate(split, judged, go_on)) is None:
                    return None
                figures[split] = found
            if few_shot.due(step, last=step == steps):
                row = few_shot(judged.params, go_on)
            if row is None:
                return None
            for line in (*in_words(figures, evaluate.metrics), *in_lines(row)):
                console.say(f"step {step} | {line}")
            if writer:
                writer.write(step, by_name(figures, "/") | row)
            if evaluate.draws:
                drawn = evaluate.pictures(splits.chosen_by, judged)
                if leader:
                    file = workdir / RECONSTRUCTIONS / f"{step}.png"
                    file.parent.mkdir(exist_ok=True)
                    file.write_bytes(reconstruction_picture(drawn))
                    if step < steps:
                        report(step, figures)
            return figures

        def report(step: int, figures: Figures, samples=(), looks=()) -> Path:
            """Written at the end, and with each picture of an objective that has such."""
            named = by_name(figures, " ").items()
            table = {name.replace("_", " "): f"{value:,.4g}" for name, value in named}
            drawn = kept_pictures(workdir / RECONSTRUCTIONS)
            shown = f"{splits.chosen_by.capitalize()} images: original, visible, predicted"
            pictures = {shown: drawn, "What it sees": dict(looks)}
            return write_report(workdir, table | {"steps": f"{step:,}"}, samples, pictures)

        figures = by_split(checkpoints.figures.get(first_step), splits.chosen_by)
        if (
            figures is None
            and first_step
            and (first_step >= steps or first_step % config.evaluate_every == 0)
        ):
            figures = evaluation(first_step)  # A signal had cut it off.
            ledger.enter("start")

        watchdog.begins("compiling and making the first step")
        for step in range(first_step + 1, steps + 1):
            trace.before(step)
            state, metrics = program.train_step(state, metrics, batch)
            batch = feed.take(state["step"]) if step < steps else None  # While the devices work on this step.
            trace.after(step, state)
            if step == first_step + 1:
                jax.block_until_ready(metrics)
                console.say(f"first step done {time.time() - started:.1f} s after the start")
                ledger.enter("train")
                log.begin(step)
            last, stopping = step == steps, stop.reached()

            log.flush()  # One step late: the devices work on this step meanwhile.
            if step % config.log_every == 0 or last:
                ledger.move("data", feed.idle_seconds)
                feed.idle_seconds = 0.0
                log.take(step, metrics)
                metrics = {**zero_metrics, "skipped": metrics["skipped"]}

            evaluating = last or step % config.evaluate_every == 0
            due = last or stopping or step % config.checkpoint.every == 0
            if lock and (evaluating or due or step % config.log_every == 0):
                lock.check()
            if evaluating or due:
                log.flush()
                log.check(step, metrics)
            figures = evaluation(step) if evaluating else None
            stopping = stopping or (evaluating and figures is None)
            if due or stopping:
                ledger.enter("save")
                watchdog.begins("saving")
                if lock:  # An evaluation takes its time.
                    lock.check()
                saved = figures and as_saved(figures, splits.chosen_by)
                checkpoints.save(step, as_items(state, metrics), saved)
            ledger.enter("train")
            watchdog.done(f"step {step}")
            if stopping and not (last and figures):
                checkpoints.wait()
                console.say(
                    f"stopped; saved {checkpoints.folder / str(step)}; the same command goes on from there"
                )
                return {}

        if figures is None:
            return {}  # Stopped again in the evaluation that a signal had cut off.
        ledger.enter("save")
        watchdog.begins("writing the report")
        params = program.judged(state).params
        samples = evaluate.samples(params) if supervised else ()
        looks = attention_figures(program.graphdef, params, mesh, evaluate.images())
        if lock:
            lock.check()
            written = report(steps, figures, samples, looks)
            checkpoints.wait()
            (line,) = in_words({"test": figures["test"]}, evaluate.metrics)
            console.say(f"done after {duration(time.time() - started)} | {line}")
            console.say(ledger.in_words())
            console.say(f"report: {written}")
        return figures["test"]


@contextlib.contextmanager
def _lost_workdir_in_words(lock: Lock | None):
    """Errors that come of a workdir that is gone say so."""
    try:
        yield
    except UserError:
        raise
    except Exception:
        if lock:
            lock.check()
        raise


@contextlib.contextmanager
def _out_of_memory_in_words(memory: MemoryCheck):
    """A want of memory is one line that says what should fit."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, UserError) and (line := memory.explain(error)):
            raise UserError(line) from error
        raise


def open_feed(config: ConfigDict, source: Source, first_step: int, say: Callable, mesh: Mesh) -> Feed:
    """Training batches from step `first_step` on, placed on the devices of `mesh`."""
    batches = training_batches(
        source,
        seed=config.seed,
        batch_size=config.batch_size,
        first_step=first_step,
        views=pictures(config),
        workers=config.data.workers,
        threads=config.data.threads,
        rows=local_rows(mesh, config.batch_size),
    )
    skipped = SkipLog(source, config.data.max_unreadable, say)
    return Feed(batches, skipped.check, mesh)


def pictures(config: ConfigDict) -> tuple[Picture, ...]:
    """How the views that the objective wants are made of an image in training."""
    crop = train_crop(config)

    def crop_of(size: int, **values) -> TrainCrop:
        return dataclasses.replace(crop, size=size, **values)

    views = objective_of(config).views(config)
    return pictures_of(views, crop_of, config.data.image_size, image_augmentation(config))


def image_augmentation(config: ConfigDict) -> Callable | None:
    """What is done to a training crop where it is decoded, `(pixels, rng) -> pixels`; None: nothing.

    Raises:
      UserError: timm's RandAugment cannot turn and shear by the interpolation of the crops.
    """
    values = config.augment
    layers_magnitude, _ = resolve(values.level, values.randaugment, values.mixup)
    policy = None
    if values.policy:
        check_policy(config)
        resampling = "bicubic" if config.data.interpolation == "bicubic" else "bilinear"
        mean = tuple(config.model.mean or (0.5,))
        fill = tuple(min(255, round(255 * x)) for x in (mean if len(mean) > 1 else 3 * mean))
        policy = RandPolicy(**rand_policy(values.policy), fill=fill, resampling=resampling)
    return host_augmentation(layers_magnitude, values.color_jitter, policy)


def with_images_of(config: ConfigDict, origin: Origin) -> ConfigDict:
    """A copy of the config, in which what a checkpoint says of images stands in the place of None."""
    config = config.copy_and_resolve_references()
    config.data.interpolation = origin.interpolation
    mean = origin.arguments["mean"]
    config.model.mean = mean if isinstance(mean, tuple) else (mean,)
    return config


def train_crop(config: ConfigDict) -> TrainCrop:
    """What training sees of an image."""
    data = config.data
    return TrainCrop(
        data.image_size,
        data.crop,
        data.crop_area,
        data.crop_aspect,
        data.crop_resize or 0,
        data.decode,
        data.interpolation or "bilinear",
        data.background,
    )


def class_count(config: ConfigDict, source: Source) -> int:
    """Width of the head: the config's, or the data set's own; 0 for an objective without labels."""
    if not objective_of(config).labels:
        return 0
    found = len(source.class_names)
    if config.data.num_classes is not None and config.data.num_classes < found:
        raise UserError(
            f"data.num_classes is {config.data.num_classes}, but the data set has {found} classes"
        )
    return config.data.num_classes or found


def step_count(config: ConfigDict, images: int) -> int:
    """Length of the run: whole batches in the config's epochs, or its steps."""
    steps = config.steps or int(config.epochs * images / config.batch_size)
    if steps < 1:
        raise UserError(
            f"{config.epochs:g} epochs of {images} images are less than one batch of {config.batch_size}; "
            "lower batch_size or raise epochs"
        )
    return steps


def as_items(state: State, metrics: Metrics) -> dict:
    """What a checkpoint holds, in parts that can be read alone."""
    run = {"step": state["step"], "skipped": state["skipped"], "metrics": metrics}
    items = {name: state[name] for name in ("params", "extra", "optimizer") if state[name]}
    return items | state["memory"] | {"run": run}


def from_items(items: dict) -> tuple[State, Metrics]:
    """The state and the metrics of a checkpoint."""
    run = dict(items["run"])
    metrics = run.pop("metrics")
    weights = {"params": items["params"], "extra": items.get("extra", {})}
    memory = {name: item for name, item in items.items() if name not in (*weights, "optimizer", "run")}
    return weights | {"memory": memory, "optimizer": items["optimizer"]} | run, metrics


def as_saved(figures: Figures, chosen_by: str) -> dict[str, float]:
    """An evaluation as a checkpoint keeps it: by their bare names the figures that choose."""
    others = {split: found for split, found in figures.items() if split != chosen_by}
    return figures[chosen_by] | by_name(others, "/")


def by_split(saved: dict[str, float] | None, chosen_by: str) -> Figures | None:
    """The evaluation that `as_saved` made."""
    figures = {}
    for name, value in (saved or {}).items():
        split, _, figure = name.rpartition("/")
        figures.setdefault(split or chosen_by, {})[figure] = value
    return figures or None


def by_name(figures: Figures, between: str) -> dict[str, float]:
    """Figures of all splits, each by the split's name and its own."""
    return {
        f"{split}{between}{name}": value for split, found in figures.items() for name, value in found.items()
    }


def in_words(figures: Figures, metrics: dict[str, str]) -> list[str]:
    """An evaluation as parts of lines, one for each split.

    Args:
      metrics: formats of the objective's, by name.
    """
    lines = []
    for split, found in figures.items():
        parts = [
            f"{split} {name.replace('_', ' ')} {in_format(found[name], metrics[name])}"
            for name in sorted(metrics)
        ]
        parts.append(f"{split} loss {found['loss']:.4f} ({found['images']:.0f} images)")
        lines.append(" | ".join(parts))
    return lines


def describe(config: ConfigDict, manifest: dict, program: Program, origin: Origin) -> str:
    """Parameters, data and devices of a run; the layers of the encoder are shown as one."""
    shown = params = program.state["params"]
    if blocks := params.get("blocks"):
        stacked = jax.tree.map(
            lambda first: jax.ShapeDtypeStruct((len(blocks), *first.shape), first.dtype), blocks["00"]
        )
        shown = params | {"blocks": {f"00-{len(blocks) - 1:02d}": stacked}}
    table = parameter_overview.get_parameter_overview(shown, include_stats=False)
    images, classes = manifest["images"], f", {manifest['num_classes']:,} classes"
    own = sum(math.prod(x.shape) for x in jax.tree.leaves(objective_weights(program.state)))
    objective = f"{config.objective.name}, {own:,} parameters of its own" if own else config.objective.name
    return "\n".join(
        [
            table,
            f"model    {config.model.name or origin.name}, {config.data.image_size} pixels, "
            f"{config.model.dtype}",
            *(f"from     {line}" for line in origin.found),
            f"data     {config.data.source} {config.data.path}: {images['train']:,} images to train, "
            + (f"{images['dev']:,} to choose by, " if "dev" in images else "")
            + f"{images['test']:,} to test"
            + (classes if manifest["num_classes"] else ""),
            f"decodes  {_decoders(config, images['train'])}",
            f"trains   {objective}",
            f"devices  {manifest['devices']}, {manifest['processes']} process(es), "
            f"batch {config.batch_size} ({config.batch_size / jax.device_count():g} a device)"
            + "".join(f", {axis} {size}" for axis, size in program.mesh.shape.items() if size > 1),
            f"run      {manifest['steps']:,} steps, seed {config.seed}",
        ]
    )


def _decoders(config: ConfigDict, images: int) -> str:
    """What decodes training images, in words."""
    workers, threads = decoders(config.data.workers, config.data.threads, images)
    return f"{f'{workers} processes of' if workers else 'this process,'} {threads} thread(s)"
