"""Training log: mean metrics since the last line, speed and remaining time."""

import jax

from vit_jax.errors import UserError
from vit_jax.options.run import RunOptions
from vit_jax.parallel.chips import peak_flops
from vit_jax.progress import duration
from vit_jax.runs.checkpoints import Checkpoints
from vit_jax.runs.console import Console, MetricWriter
from vit_jax.runs.goodput import Ledger
from vit_jax.training.objectives.objective import in_format
from vit_jax.training.program import Program

MANY = 64  # This number of images is unlikely to be all predicted correctly by chance.


class TrainLog:
    """Writes a row of metrics at each log step, and a progress line at intervals.

    The sums of metrics are copied from the devices only after the next step has started, so the
    devices do not wait for the host.

    Args:
      images: number of images in the training split.
      flops: training FLOPs per image.
      ledger: timer of training and other work (`goodput.py`).
      skipped: number of updates that a resumed run has skipped before it was resumed.
      classes: number of classes in the training split; 0: the objective has no labels.
    """

    def __init__(
        self,
        config: RunOptions,
        program: Program,
        *,
        steps: int,
        images: int,
        flops: float,
        checkpoints: Checkpoints,
        console: Console,
        writer: MetricWriter | None,
        ledger: Ledger,
        skipped: int,
        classes: int = 0,
    ):
        self._steps, self._batch_size, self._images = steps, config.batch_size, images
        self._schedule = jax.jit(program.schedule)  # One program instead of one per operation.
        self._objective = program.abstract_objective()
        self._metrics, self._warned = self._objective.metrics, False
        self._checkpoints, self._console, self._writer = checkpoints, console, writer
        # Number of images that the devices would process per second at their peak FLOP/s. None: the
        # peak is unknown.
        peak = peak_flops(jax.devices()[0].device_kind)
        self._peak_speed = peak * jax.device_count() / flops if peak else None
        self._ledger, self._max_skipped = ledger, config.max_skipped_steps
        self._pending = None
        self._skipped = skipped
        self._begun = self._logged = None
        # With a linear probe as the initial head, a loss of zero is plausible from the first step
        # on.
        self._suspicion = None if config.finetune.head == "probe" else Suspicion(classes)

    def begin(self, step: int) -> None:
        """Starts to measure the speed. Must be called when the step has been compiled."""
        self._begun = self._logged = step, *self._clock()

    def take(self, step: int, metrics: dict) -> None:
        """Queues the sums of metrics of a log step. The sums are still on the devices."""
        self._pending = step, metrics

    def check(self, step: int, metrics: dict) -> None:
        """Logs the number of updates skipped since the last check.

        An update is skipped if its loss or gradient is not finite.

        Raises:
          UserError: too many consecutive updates were skipped.
        """
        skipped = {name: int(count) for name, count in metrics["skipped"].items()}
        first = step - skipped["in_a_row"] + 1
        if skipped["in_a_row"] > self._max_skipped:
            raise UserError(
                f"the loss or the gradient is not finite from step {first} on; "
                f"{self._checkpoints.last_good}; "
                "try a lower optimizer.learning_rate or a longer warm-up, or check the data "
                f"(up to {self._max_skipped} such steps in a row are skipped: max_skipped_steps)"
            )
        if new := skipped["total"] - self._skipped:
            self._console.log(
                f"note: {new} update(s) up to step {step} skipped, as the loss or the gradient "
                f"was not finite; {skipped['total']} in all"
            )
        self._skipped = skipped["total"]

    def flush(self) -> None:
        """Writes the queued metrics; raises UserError if too many updates were skipped."""
        if self._pending is None:
            return
        (step, sums), self._pending = self._pending, None
        sums = jax.device_get(sums)
        self.check(step, sums)
        before, self._logged = self._logged, (step, *self._clock())
        row, means = self._row(step, sums, before)
        if step == self._steps or self._console.due:
            self._console.status(self._line(step, row, means), last=step == self._steps)
        if not self._warned and (warning := self._objective.warning(means, step)):
            self._console.log(f"warning: {warning}")
            self._warned = True
        first = self._suspicion is not None and self._begun[0] == 1
        if first and (remark := self._suspicion.remark(means, step * self._batch_size)):
            self._console.log(f"warning: {remark}")
        if self._writer:
            self._writer.write(step, row | self._ledger.row())

    def look(self, step: int, metrics: dict) -> None:
        """Writes a progress line between two log steps if the last line is too old.

        This process then waits for the current step. Other processes do not wait, because the
        metrics are copied from this process's own devices.
        """
        if self._console.late:
            row, means = self._row(step, jax.device_get(metrics), self._logged)
            self._console.status(self._line(step, row, means))

    def _row(
        self, step: int, sums: dict, before: tuple[int, float, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Returns a step's row for `metrics.jsonl`, and the metrics' means since the last row.

        Args:
          sums: sums of the metrics since the last row.
          before: the last row's step, and the values that `_clock` returned for that row.
        """
        done, seconds = step - before[0], self._clock()[0] - before[1]
        # If the loss was not finite in any step, the means are NaN. NaN is written as null.
        finite = float(sums["steps"]) or float("nan")
        means = {
            name: float(x) / finite for name, x in sums.items() if name not in ("steps", "skipped")
        }
        row = {"epoch": step * self._batch_size / self._images}
        row |= {f"train/{name}": value for name, value in means.items()}
        row["train/learning_rate"] = float(self._schedule(step))
        row["train/skipped_steps"] = float(sums["skipped"]["total"])
        if done:
            row["train/images_per_second"] = speed = done * self._batch_size / seconds
            if self._peak_speed:
                row["train/mfu"] = speed / self._peak_speed
        return row, means

    def _line(self, step: int, row: dict[str, float], means: dict[str, float]) -> str:
        line = f"step {step}/{self._steps} | epoch {row['epoch']:.1f} | loss {means['loss']:.4f}"
        for name in sorted(self._metrics):
            line += f" | {name.replace('_', ' ')} {in_format(means[name], self._metrics[name], 1)}"
        line += f" | lr {row['train/learning_rate']:.2e}"
        if speed := row.get("train/images_per_second"):
            line += f" | {speed:,.0f} images/s ({speed / jax.device_count():,.0f} a device)"
            if "train/mfu" in row:
                line += f" | MFU {row['train/mfu']:.1%}"
            begun, _, since = self._begun
            left = (self._clock()[1] - since) / (step - begun) * (self._steps - step)
            line += f" | {duration(left)} left"
        return line

    def account(self, step: int) -> None:
        """Writes the seconds of each kind of work; a resumed run adds its seconds to these."""
        if self._writer:
            self._writer.write(step, self._ledger.row())

    def _clock(self) -> tuple[float, float]:
        """Returns seconds of training, and of all repeated work, such as evaluations."""
        row = self._ledger.row()
        training = row["time/train"] + row["time/data"]
        return training, training + row["time/evaluate"] + row["time/save"]


class Suspicion:
    """Detects signs of wrong labels in the first metrics; `classes` is 0 without labels."""

    def __init__(self, classes: int):
        self._classes, self._over = classes, False
        self._constant: float | None = None  # The accuracy, if all rows so far have the same.

    def remark(self, means: dict[str, float], images: int) -> str | None:
        """Returns a warning if the loss is 0, or if the accuracy has always been 0 or always 1.

        None: no reason for a warning, or there was one before. `images` is the number of images
        trained on since the first step.
        """
        if self._over:
            return None
        first, accuracy = self._constant is None, means.get("accuracy")
        self._over = not first and accuracy != self._constant or accuracy not in (0.0, 1.0)
        self._constant = accuracy
        # If the accuracy is 0, the warning requires 10 images per class. The probability that
        # random predictions are wrong for all of these images is below 1 in 20,000.
        enough = images >= (10 * self._classes if accuracy == 0.0 else MANY)
        if first and abs(means["loss"]) < 0.00005:
            figure = "the loss is 0.0000"
        elif not self._over and self._classes and enough:
            figure = f"the accuracy is {accuracy:.0%}"
        else:
            return None
        self._over = True
        return (
            f"{figure} from the first step on: check the labels, and the classes listed at the "
            "start"
        )
