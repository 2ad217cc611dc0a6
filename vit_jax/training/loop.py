"""A run from its config to its report.

One turn of the loop, in this order: step, take the next batch, log, evaluate, save. A run that is
stopped anywhere and started again on the same workdir goes on from its newest checkpoint and
ends with the same bits: batches and random numbers are functions of the seed and the step.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import jax
from clu import parameter_overview
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.data.augment import host_augmentation, resolve
from vit_jax.data.pipeline import SkipLog, training_batches
from vit_jax.data.preprocess import TrainCrop
from vit_jax.data.sources import Source, fingerprint, open_source
from vit_jax.errors import UserError
from vit_jax.models import count_multiply_adds, model_factory
from vit_jax.parallel.host import keep_freed_memory, share_interpreter
from vit_jax.parallel.mesh import check_batch, make_mesh, replicated, split_batch
from vit_jax.parallel.peers import Peers
from vit_jax.training.checkpoint import Checkpoints
from vit_jax.training.evaluator import Evaluator
from vit_jax.training.feed import Feed
from vit_jax.training.optimizer import make_optimizer, make_schedule
from vit_jax.training.progress import Console, MetricWriter, duration
from vit_jax.training.report import write_report
from vit_jax.training.step import init_metrics, init_state, make_train_step
from vit_jax.training.stop import StopSignal
from vit_jax.training.trainlog import TrainLog
from vit_jax.training.workdir import CHECKPOINTS, check_shared, claim, make_manifest, model_arguments


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
      The last evaluation's figures; empty when the run was stopped before its end.

    Raises:
      UserError: the config does not fit the data, the devices or the workdir; the loss is no
        longer finite; the disk is full; too many images are unreadable.
    """
    started, peers = started or time.time(), peers or Peers()
    share_interpreter()
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    check_batch(config.batch_size, config.micro_batches)
    train_source, test_source = open_sources(config)
    if peers.count > 1:
        peers.agree("the training data", fingerprint(train_source))
        peers.agree("the test data", fingerprint(test_source))
    num_classes = class_count(config, train_source)
    steps = step_count(config, len(train_source))
    schedule = make_schedule(config.optimizer, steps)
    build = model_factory(num_classes=num_classes, **model_arguments(config))
    model = build(rngs=nnx.Rngs(config.seed))
    multiply_adds = count_multiply_adds(model)
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)

    mesh = make_mesh()
    leader = jax.process_index() == 0
    manifest = make_manifest(
        steps, train_source.class_names, num_classes, {"train": len(train_source), "test": len(test_source)}
    )
    if leader:
        claim(workdir, config, manifest)
    check_shared(workdir, peers)
    console = Console(workdir / "log.txt" if leader else None)
    console.say(describe(config, manifest, params))
    for split, source in (("training", train_source), ("test", test_source)):
        if source.empty_classes:
            console.say(f"note: no {split} images of {', '.join(source.empty_classes[:20])}")
    warn = console.say if leader else print  # Each process names the images that it cannot read.

    everywhere = replicated(mesh)
    optimizer = make_optimizer(config.optimizer, schedule)
    state = jax.device_put(init_state(params, optimizer), everywhere)
    del model, params  # Else the first device keeps a second copy of them.
    metrics = zero_metrics = jax.device_put(init_metrics(), everywhere)
    train_step = make_train_step(graphdef, optimizer, config, mesh)
    evaluate = Evaluator(graphdef, test_source, config, mesh, warn)

    with contextlib.ExitStack() as resources:
        stop = resources.enter_context(StopSignal())
        checkpoints = resources.enter_context(Checkpoints(workdir / CHECKPOINTS, config.checkpoints_kept))
        first_step = checkpoints.latest or 0
        if first_step:
            restored = checkpoints.restore(first_step, as_items(state, metrics))
            state = {name: restored[name] for name in ("params", "optimizer")} | {
                "step": restored["run"]["step"]
            }
            metrics = restored["run"]["metrics"]
            console.say(f"continuing from {checkpoints.folder / str(first_step)}")
        writer = MetricWriter(workdir, first_step) if leader else None
        log = TrainLog(
            steps=steps,
            first_step=first_step,
            batch_size=config.batch_size,
            images=len(train_source),
            multiply_adds=multiply_adds,
            schedule=schedule,
            checkpoints=checkpoints,
            console=console,
            writer=writer,
        )
        feed = resources.enter_context(
            contextlib.closing(open_feed(config, train_source, first_step, warn, mesh))
        )
        batch = next(feed) if first_step < steps else None
        figures = evaluate(state["params"]) if first_step >= steps else {}

        for step in range(first_step + 1, steps + 1):
            state, metrics = train_step(state, metrics, batch)
            batch = next(feed) if step < steps else None  # While the devices work on this step.
            if step == first_step + 1:
                jax.block_until_ready(metrics)
                console.say(f"first step done {time.time() - started:.1f} s after the start")
                log.resume_clock(step)
            last, stopping = step == steps, stop.reached(step)

            log.flush()  # One step late: the devices work on this step meanwhile.
            if step % config.log_every == 0 or last:
                log.take(step, metrics)
                metrics = zero_metrics

            evaluating = last or step % config.evaluate_every == 0
            saving = last or stopping or step % config.checkpoint_every == 0
            if evaluating or saving:
                log.flush()
                log.check(metrics)
            if evaluating:
                log.pause_clock()
                figures = evaluate(state["params"])
                console.say(f"step {step} | {in_words(figures)}")
                if writer:
                    writer.write(step, {f"test/{name}": value for name, value in figures.items()})
                log.resume_clock(step)
            if saving:
                checkpoints.save(step, as_items(state, metrics))
            if stopping and not last:
                checkpoints.wait()
                console.say(
                    f"stopped; saved {checkpoints.folder / str(step)}; the same command goes on from there"
                )
                return {}

        samples = evaluate.samples(state["params"])
        if leader:
            table = {f"test {name}": f"{value:,.4g}" for name, value in figures.items()}
            report = write_report(workdir, table | {"steps": f"{steps:,}"}, samples)
            checkpoints.wait()
            console.say(f"done after {duration(time.time() - started)} | {in_words(figures)}")
            console.say(f"report: {report}")
        return figures


def open_sources(config: ConfigDict) -> tuple[Source, Source]:
    """The training and the test split."""
    values = config.data
    arguments = dict(
        path=values.path,
        label_key=values.label_key,
        num_classes=values.num_classes,
        parts=values.parts or (),
        weights=values.weights,
        image_size=values.image_size,
    )
    train_source = open_source(values.source, values.train_split, **arguments)
    names = train_source.class_names
    return train_source, open_source(values.source, values.test_split, class_names=names, **arguments)


def open_feed(config: ConfigDict, source: Source, first_step: int, say: Callable, mesh: Mesh) -> Feed:
    """Training batches from step `first_step` on, placed on the devices of `mesh`."""
    layers_magnitude, _ = resolve(config.augment.level, config.augment.randaugment, config.augment.mixup)
    batches = training_batches(
        source,
        seed=config.seed,
        batch_size=config.batch_size,
        first_step=first_step,
        crop=train_crop(config),
        augment=host_augmentation(layers_magnitude, config.augment.color_jitter),
        workers=config.data.workers,
        threads=config.data.threads,
        process=jax.process_index(),
        processes=jax.process_count(),
    )
    skipped = SkipLog(source, config.data.max_unreadable, say)
    return Feed(batches, skipped.check, split_batch(mesh))


def train_crop(config: ConfigDict) -> TrainCrop:
    """What training sees of an image."""
    data = config.data
    return TrainCrop(
        data.image_size, data.crop, data.crop_area, data.crop_aspect, data.crop_resize or 0, data.decode
    )


def class_count(config: ConfigDict, source: Source) -> int:
    """Width of the head: the config's, or the data set's own."""
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


def as_items(state: dict, metrics: dict) -> dict:
    """What a checkpoint holds, in parts that can be read alone."""
    run = {"step": state["step"], "metrics": metrics}
    return {"params": state["params"], "optimizer": state["optimizer"], "run": run}


def in_words(figures: dict[str, float]) -> str:
    """An evaluation as part of a line."""
    return (
        f"test accuracy {figures['accuracy']:.2%} | test loss {figures['loss']:.4f} "
        f"({figures['images']:.0f} images)"
    )


def describe(config: ConfigDict, manifest: dict, params: dict) -> str:
    """Parameters, data and devices of a run; the layers of the encoder are shown as one."""
    shown = params
    if blocks := params.get("blocks"):
        stacked = jax.tree.map(
            lambda first: jax.ShapeDtypeStruct((len(blocks), *first.shape), first.dtype), blocks["00"]
        )
        shown = params | {"blocks": {f"00-{len(blocks) - 1:02d}": stacked}}
    table = parameter_overview.get_parameter_overview(shown, include_stats=False)
    images = manifest["images"]
    return "\n".join(
        [
            table,
            f"model    {config.model.name}, {config.data.image_size} pixels, {config.model.dtype}",
            f"data     {config.data.source} {config.data.path}: {images['train']:,} images to train, "
            f"{images['test']:,} to test, {manifest['num_classes']:,} classes",
            f"devices  {manifest['devices']}, {manifest['processes']} process(es), "
            f"batch {config.batch_size} ({config.batch_size // jax.device_count()} a device)",
            f"run      {manifest['steps']:,} steps, seed {config.seed}",
        ]
    )
