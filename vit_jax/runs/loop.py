"""Training loop of a run, from its config to its report.

Each iteration consists of step, next batch, logging, evaluation and checkpoint, in this order. A
run that was stopped can be started again on the same workdir. It then continues from its newest
checkpoint. The result is bit-exact: it does not depend on where a run was stopped, because batches
and random numbers depend only on the seed and the step.
"""

import contextlib
import shutil
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from vit_jax.config import value_at
from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import params_of
from vit_jax.options.run import RunOptions, parse_profile
from vit_jax.parallel.peers import Peers
from vit_jax.parallel.process_settings import keep_freed_memory, share_interpreter
from vit_jax.parallel.sharding import path_name
from vit_jax.paths import OBJECTIVE_FILES
from vit_jax.progress import LINE, duration, ticking
from vit_jax.runs.api_overrides import ApiOverrides
from vit_jax.runs.assemble import Parts, assemble, learned_classes, open_feed
from vit_jax.runs.bucket import Upload, checkpoints_of, shown, url_of
from vit_jax.runs.bucket_lock import BucketLock
from vit_jax.runs.checkpoints import Checkpoints, as_items, from_items
from vit_jax.runs.console import Console, MetricWriter
from vit_jax.runs.data_identity import leak_warning
from vit_jax.runs.goodput import Ledger, read_rows
from vit_jax.runs.memory_check import MemoryCheck
from vit_jax.runs.periodic_evaluation import KNN, Figures, PeriodicEvaluation, since_start
from vit_jax.runs.preemption import StopSignal
from vit_jax.runs.probe_head import with_probe_head
from vit_jax.runs.profiler_trace import Trace
from vit_jax.runs.run_summary import describe
from vit_jax.runs.splits import SPOKEN, notes
from vit_jax.runs.trackers import deliveries
from vit_jax.runs.training_log import TrainLog
from vit_jax.runs.warm_start import fingerprint_of
from vit_jax.runs.watchdog import Watchdog
from vit_jax.runs.workdir import (
    METRICS,
    check_shared,
    claim,
    make_manifest,
    run_of_checkpoint,
    steps_of,
)
from vit_jax.runs.workdir_lock import Lock
from vit_jax.training.objectives import is_handed_in, objective_of


def train(
    config: RunOptions,
    workdir: Path,
    peers: Peers | None = None,
    started: float | None = None,
    overrides: ApiOverrides | None = None,
) -> dict[str, float]:
    """Trains to the end, or until SIGTERM or SIGINT, and writes all results into `workdir`.

    Args:
      config: options that `vit_jax.config.check` has accepted.
      workdir: a new or empty folder, or the workdir of a run with the same config. In the latter
        case this run is resumed.
      peers: the run's processes, if there are several (`vit_jax.parallel.distributed.start`).
      started: `time.time()` when the command began, for the log.
      overrides: API overrides of the calling program. None: a command calls this function, and the
        process has no other work. So the watchdog ends the process if it hangs.

    Returns:
      Metrics on the test images from the last evaluation; empty if the run was stopped before its
      end.

    Raises:
      UserError: the config is incompatible with the data, the devices or the workdir. Or another
        run uses the workdir, the workdir was deleted, the loss is no longer finite, the disk or a
        device's memory is full, or too many images are unreadable.
    """
    peers, started = peers or Peers(), started or time.time()
    with (
        Watchdog(config.hang_seconds, ends=overrides is None) as watchdog,
        contextlib.ExitStack() as held,
    ):
        if overrides is None:
            share_interpreter()
            keep_freed_memory()
        _check_files(config, workdir)
        parts = assemble(config, peers, watchdog.set_phase, overrides, steps_of(workdir, config))
        flops = parts.program.flops()
        lock, console = _take_workdir(config, parts, workdir, peers, watchdog, held, flops)
        on_log = overrides and overrides.on_log
        run = Run(parts, workdir, peers, started, watchdog, console, lock, held, flops, on_log)
        figures = run.turns()
        if figures is None:
            return {}
        run.finish(figures)
        return figures["test"]


def _take_workdir(
    config: RunOptions,
    parts: Parts,
    workdir: Path,
    peers: Peers,
    watchdog: Watchdog,
    held: contextlib.ExitStack,
    flops: float,
) -> tuple[Lock | BucketLock | None, Console]:
    """Claims the workdir and logs the run's description; returns the lock and the console.

    Process 0 holds the lock for all processes, until the end of `held`. In the other processes the
    lock is None. `flops` are the training FLOPs per image.
    """
    program, origin, splits = parts.program, parts.origin, parts.splits
    leader = jax.process_index() == 0
    memory = MemoryCheck(program, config, splits.train.max_labels, parts.program_of)
    held.enter_context(_out_of_memory_in_words(memory))
    memory.check(print if leader else lambda line: None)
    images = {name: len(source) for name, source in splits.named.items()}
    names = learned_classes(parts.config, splits.train)
    objective = program.abstract_objective()
    manifest = make_manifest(
        parts.steps,
        names,
        images,
        origin.options,
        origin.interpolation,
        metrics=objective.metrics | objective.split_metrics,
        flops=flops,
    )
    watchdog.set_phase("reading the frozen model")
    manifest |= _identified(parts, peers)
    watchdog.set_phase(f"taking the workdir {shown(workdir)}")
    lock = held.enter_context(claim(workdir, config, manifest)) if leader else None
    held.enter_context(_lost_workdir_in_words(lock))
    if leader:
        _copy_files(objective_of(config.objective.name).files(parts.config), workdir)
    check_shared(workdir, peers)
    console = Console(workdir / "log.txt" if leader else None)
    console.log(describe(parts, manifest))
    for note in notes(parts.config, splits, parts.overrides.groups):
        console.log(note)
    if (
        config.finetune.checkpoint
        and (earlier := run_of_checkpoint(config.finetune.checkpoint))
        and (warning := leak_warning(config, parts.data, earlier.config, earlier.manifest))
    ):
        console.log(warning)
    if len(splits.train) < config.batch_size:
        console.log(
            f"note: a batch of {config.batch_size} shows images of {len(splits.train)} more than "
            "once"
        )
    return lock, console


def _check_files(config: RunOptions, workdir: Path) -> None:
    """Raises UserError if files of the objective, such as a tokenizer, no longer exist.

    The message names the flag that uses the copies in the workdir.
    """
    objective, copies = objective_of(config.objective.name), workdir / OBJECTIVE_FILES
    if not objective.files_option or not copies.is_dir():
        return
    if not objective.files(config):
        key = objective.files_option
        raise UserError(
            f"config.{key}={value_at(config, key)!r} has no files any more; the run has a copy of "
            f"them: --config.{key}={copies}"
        )


def _copy_files(files: Sequence[Path], workdir: Path) -> None:
    """Copies files of the run's objective, such as a tokenizer, into its workdir."""
    folder = workdir / OBJECTIVE_FILES
    if not files or files[0].parent.resolve() == folder.resolve():
        return
    folder.mkdir(exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)
    for file in folder.iterdir():  # Removes files of another tokenizer, used before data changed.
        if file.name not in {kept.name for kept in files}:
            file.unlink()


def _identified(parts: Parts, peers: Peers) -> dict:
    """Returns manifest values that identify the data, API overrides and the frozen model."""
    values = {"data": parts.data}
    if parts.overrides.model is not None:
        values["parameters"] = fingerprint_of(sorted(params_of(parts.overrides.model).items()))
    if parts.frozen is not None:
        values["frozen"] = {"parameters": parts.frozen.fingerprint()}
        peers.agree("the frozen model", values["frozen"])
    if is_handed_in(parts.config.objective.name):
        kind = objective_of(parts.config.objective.name)
        name = f"{kind.__module__}.{kind.__qualname__}"
        values["objective"] = {"class": name, "eval_params": kind.eval_params(parts.config)}
    return values


class Run:
    """A run in its workdir: the training state, and the objects that the training loop uses.

    Args:
      started: `time.time()` when the command began.
      lock: lock of the workdir, on the process that writes; None on all other processes.
      held: exit stack that closes the run's resources at the end of the run.
      flops: training FLOPs per image.
      on_log: callback that receives the step and the metrics of each logged row.
    """

    def __init__(
        self,
        parts: Parts,
        workdir: Path,
        peers: Peers,
        started: float,
        watchdog: Watchdog,
        console: Console,
        lock: Lock | BucketLock | None,
        held: contextlib.ExitStack,
        flops: float,
        on_log: Callable[[int, dict[str, float]], None] | None = None,
    ):
        self.parts, self.config = parts, parts.config
        self.program, self.steps = parts.program, parts.steps
        self.started, self.watchdog, self.console, self.lock = started, watchdog, console, lock
        leader = jax.process_index() == 0
        # Each process logs the unreadable images that it reads.
        warn = console.log if leader else print
        self.upload = (
            held.enter_context(Upload(workdir, lock.check)) if lock and url_of(workdir) else None
        )
        self.stop = held.enter_context(StopSignal())
        watchdog.report_to(workdir / f"stacks-{jax.process_index()}.txt", warn)
        watchdog.set_phase("reading the newest checkpoint")
        retention = self.config.checkpoint
        retention = retention.keep_last, retention.keep_every, retention.keep_best
        self.checkpoints = held.enter_context(
            Checkpoints(checkpoints_of(workdir), *retention, console.log)
        )
        self.first_step = self._restore(peers)
        self.zero_metrics = self.program.initial_metrics()
        self.ledger = Ledger(started, read_rows(workdir / METRICS), self.first_step)
        writer = None
        if leader:
            writer = held.enter_context(
                contextlib.closing(MetricWriter(workdir, self.first_step, on_log))
            )
            watchdog.set_phase("opening the trackers of log.to")
            writer.deliver_to(deliveries(self.config.log.to, workdir, writer.rows, console.log))
        self.evaluation = PeriodicEvaluation(parts, workdir, console, writer, warn)
        self.log = TrainLog(
            self.config,
            self.program,
            steps=self.steps,
            images=len(parts.splits.train),
            flops=flops,
            checkpoints=self.checkpoints,
            console=console,
            writer=writer,
            ledger=self.ledger,
            skipped=int(self.metrics["skipped"]["total"]),
            classes=len(parts.splits.train.class_names)
            if objective_of(self.config.objective.name).labels
            else 0,
        )
        trace = Trace(parse_profile(self.config.profile), workdir / "profile", console.log)
        self.trace = held.enter_context(trace)
        feed = open_feed(self.config, parts.splits.train, self.first_step, warn, parts.mesh)
        self.feed = held.enter_context(contextlib.closing(feed))
        watchdog.set_phase("reading the first batch")
        self.batch = self.feed.take() if self.first_step < self.steps else None
        held.callback(LINE.clear)
        held.enter_context(ticking(lambda: console.still(watchdog.in_words())))

    def turns(self) -> Figures | None:
        """Trains to the last step; returns its metrics by split; None: a signal stopped the run."""
        figures = self._first_figures()
        if figures and "kept" in figures:  # The run has ended, perhaps before its last step.
            return figures
        self.watchdog.set_phase("compiling the step")
        if self.first_step < self.steps:
            self.console.log("compiling the step ...")
        for step in range(self.first_step + 1, self.steps + 1):
            last = step == self.steps
            self.trace.before(step)
            previous = self.metrics
            self.state, self.metrics = self.program.train_step(self.state, self.metrics, self.batch)
            # Takes the next batch while the devices work on this step.
            self.batch = None if last else self.feed.take(self.state["step"])
            # Without this wait, JAX would start up to 32 steps in advance. On a CPU this can be
            # minutes, without a progress line and without a reaction to signals.
            jax.block_until_ready(previous)
            self.trace.after(step, self.state)
            first = step == self.first_step + 1
            if first:
                self._first_step_done(step)
            stopping = self.stop.reached()
            logging = last or step % self.config.log_every == 0
            evaluating = last or step % self.config.evaluate_every == 0
            saving = last or stopping or step % self.config.checkpoint.every == 0

            self._log(step, logging)
            self._check(step, logging, evaluating or saving)
            figures = self._evaluate(step, last) if evaluating else None
            over = figures is not None and (last or "kept" in figures)
            stopping = stopping or (evaluating and figures is None)
            if saving or stopping:
                self._save(step, figures)
            self.ledger.enter("train")
            # Unless the run has waited for this step, the devices still compute it.
            self.watchdog.done(f"step {step if first or evaluating or saving else step - 1}")
            if over:
                return figures
            if stopping:
                self._say_stopped(step)
                return None
        return figures

    def finish(self, figures: Figures) -> None:
        """Writes the report, and logs a summary of the run."""
        self.ledger.enter("save")
        self.watchdog.set_phase("writing the report")
        write = self.evaluation.last_report(self.state)
        if self.lock:
            self.lock.check()
            report = write()
            self.checkpoints.wait()
            (line,) = self.evaluation.in_words({"test": figures["test"]})
            self.console.log(f"done after {duration(time.time() - self.started)} | {line}")
            rows = read_rows(self.evaluation.workdir / METRICS)
            for line in since_start(rows, self.config.finetune.head == "probe"):
                self.console.log(line)
            self.console.log(self.ledger.in_words())
            self.console.log(f"report: {shown(report.parent)}/{report.name}")

    def _restore(self, peers: Peers) -> int:
        """Restores the newest checkpoint, or initializes the state; returns the state's step."""
        program, origin, frozen = self.program, self.parts.origin, self.parts.frozen
        frozen = frozen.read() if frozen else {}
        if restored := self.checkpoints.restore_newest(as_items(program.state, program.metrics)):
            step, items = restored
            self.state, self.metrics = from_items(items)
            self.state["frozen"] = program.placed_frozen(frozen)
            self.console.log(f"continuing from {self.checkpoints.folder / str(step)}")
            return step
        self.watchdog.set_phase("making the first parameters")
        start = {"params": origin.read(), "objective": origin.read_objective()}
        start["objective_state"] = origin.read_objective_state()
        if self.config.finetune.head == "probe":
            self.watchdog.set_phase("fitting the linear probe")
            start["params"] = with_probe_head(self.parts, start["params"], self.console.log)
        if peers.count > 1:
            leaves = jax.tree.leaves_with_path(start)
            sums = {path_name(path): zlib.crc32(x) for path, x in leaves}
            peers.agree("the checkpoint to start from", sums)
        self.state = program.initial_state(self.config.seed, frozen=frozen, **start)
        self.metrics = program.initial_metrics()
        return 0

    def _first_figures(self) -> Figures | None:
        """Returns the evaluation metrics at the step from which the run continues.

        If a signal interrupted the evaluation at this step, it is repeated now. At step 0, the
        parameters are evaluated only if the run compares later parameters with the initial ones.
        """
        step, last = self.first_step, self.first_step >= self.steps
        figures = self.evaluation.restored(self.checkpoints.figures.get(step))
        compared = self.config.finetune.head == "probe" or self.config.auto == "pretrain"
        if step == 0 and figures is None and compared:
            if (figures := self._evaluate_start()) is not None:
                self._save(step, figures)
        elif figures is None and step and (last or step % self.config.evaluate_every == 0):
            figures = self._evaluate(step, last)
            if figures and "kept" in figures:
                self._save(step, figures, overwrite=True)
        self.ledger.enter("start")
        return figures

    def _first_step_done(self, step: int) -> None:
        jax.block_until_ready(self.metrics)
        self.console.log(f"first step done {time.time() - self.started:.1f} s after the start")
        self.ledger.enter("train")
        self.log.begin(step)

    def _log(self, step: int, logging: bool) -> None:
        """Writes the metrics of an earlier step, and queues the metrics of this step.

        They are written while the devices compute the next step, so no step waits for the host.
        """
        self.log.flush()
        if logging:
            self.ledger.move("data", self.feed.idle_seconds)
            self.feed.idle_seconds = 0.0
            self.log.take(step, self.metrics)
            self.metrics = {**self.zero_metrics, "skipped": self.metrics["skipped"]}
        else:
            self.log.look(step, self.metrics)

    def _check(self, step: int, logging: bool, waiting: bool) -> None:
        """Checks that the run still owns its workdir, and that the loss is finite.

        The loss is only checked if `waiting` is True: the run waits for this step anyway.
        """
        if self.lock and (waiting or logging):
            self.lock.check()
        if waiting:
            self.log.flush()
            self.log.check(step, self.metrics)

    def _evaluate(self, step: int, last: bool) -> Figures | None:
        """Evaluates the newest parameters; returns None if a signal interrupted the evaluation.

        In the run's last evaluation, if `checkpoint.final` is `best`, the parameters of the best
        step are restored and evaluated on the test images. The item `kept` of the result contains
        the best step.
        """
        self.ledger.enter("evaluate")
        self.watchdog.set_phase("evaluating")
        if self.config.checkpoint.final == "last":
            return self.evaluation(step, self.state, self._go_on)
        chosen_by = self.evaluation.chosen_by
        figures = self.evaluation(step, self.state, self._go_on, (chosen_by,), last=False)
        if figures is None:
            return None
        saved = self.evaluation.saved(figures)
        best = self.checkpoints.best_with({step: saved})
        patience = self.config.early_stopping
        stops_early = patience is not None and step - best >= patience * self.config.evaluate_every
        if not (last or stops_early):
            return figures
        state = self.state
        if best != step:
            self.checkpoints.wait()
            items = as_items(state, self.metrics)
            items.pop("optimizer", None)
            self.console.log(
                f"kept: the parameters of step {best}, the best "
                + ("by k-NN" if KNN in saved else f"on the {SPOKEN[chosen_by]} images")
                + (f"; none was better in {patience} evaluations" if stops_early else "")
            )
            best_items = self.checkpoints.restore(best, items)
            run = {key: state[key] for key in ("step", "skipped")} | {"metrics": self.metrics}
            state, _ = from_items(best_items | {"optimizer": state["optimizer"], "run": run})
            state["frozen"] = self.state["frozen"]
            figures = self.evaluation.restored(self.checkpoints.figures[best])
        tested = self.evaluation(step, state, self._go_on, ("test",), last=True, kept=best)
        if tested is None:
            return None
        self.state = state
        return {chosen_by: figures[chosen_by], "kept": {"step": best}} | tested

    def _evaluate_start(self) -> Figures | None:
        """Evaluates the initial parameters on dev and test images, as a baseline."""
        self.ledger.enter("evaluate")
        self.watchdog.set_phase("evaluating the first parameters")
        splits = dict.fromkeys((self.evaluation.chosen_by, "test"))
        return self.evaluation(0, self.state, self._go_on, [*splits], last=False)

    def _go_on(self) -> bool:
        self.watchdog.done("a batch of the evaluation")
        return not self.stop.reached()

    def _save(self, step: int, figures: Figures | None, overwrite: bool = False) -> None:
        self.ledger.enter("save")
        self.watchdog.set_phase("saving")
        if self.lock:  # During an evaluation, another run may have taken the workdir.
            self.lock.check()
        # The rows of metrics are uploaded before the checkpoint, because a run that continues from
        # this checkpoint needs all rows up to the checkpoint's step.
        if self.upload:
            self.upload.flush()
        saved = figures and self.evaluation.saved(figures)
        self.checkpoints.save(step, as_items(self.state, self.metrics), saved, overwrite)

    def _say_stopped(self, step: int) -> None:
        self.checkpoints.wait()
        self.log.account(step)
        folder = self.checkpoints.folder / str(step)
        again = f"with --workdir={shown(self.evaluation.workdir)} it resumes there"
        self.console.log(f"stopped; saved {folder}; started again {again}")


@contextlib.contextmanager
def _lost_workdir_in_words(lock: Lock | BucketLock | None):
    """Context that replaces exceptions by the lock's UserError if the run lost its workdir."""
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
    """Context that converts out-of-memory errors to a UserError that suggests config changes."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, UserError) and (line := memory.explain(error)):
            raise UserError(line) from error
        raise
