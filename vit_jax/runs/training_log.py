"""Training log: metrics since the last line, speed and remaining time."""

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

MANY = 64  # Number of images that are unlikely to be all correct by chance.


class TrainLog:
    """Converts sums of metrics into a row per log step and a progress line at intervals.

    A row is fetched from the devices only after the next step has started.

    Args:
      images: number of images in the training split.
      flops: training FLOPs per image.
      ledger: timer of training and other work.
      skipped: number of updates that were already skipped.
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
        # Images per second at the devices' peak FLOPs; None: unknown.
        peak = peak_flops(jax.devices()[0].device_kind)
        self._peak_speed = peak * jax.device_count() / flops if peak else None
        self._ledger, self._max_skipped = ledger, config.max_skipped_steps
        self._pending = None
        self._skipped = skipped
        self._begun = self._logged = None
        # With a linear probe as the head, the loss may be zero from the first step on.
        self._suspicion = None if config.finetune.head == "probe" else Suspicion(classes)

    def begin(self, step: int) -> None:
        """Starts to measure the speed, now that the program is compiled."""
        self._begun = self._logged = step, *self._clock()

    def take(self, step: int, metrics: dict) -> None:
        """Queues the sums of a log step, which are still on the devices."""
        self._pending = step, metrics

    def check(self, step: int, metrics: dict) -> None:
        """Logs the updates skipped since the last check, because loss or gradient were not finite.

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
        """Writes the queued metrics, if any.

        Raises:
          UserError: too many consecutive losses were not finite.
        """
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
        """Writes a progress line between two rows if the last line is too old.

        Only this process waits for the step, as the metrics are on its own devices.
        """
        if self._console.late:
            row, means = self._row(step, jax.device_get(metrics), self._logged)
            self._console.status(self._line(step, row, means))

    def _row(
        self, step: int, sums: dict, before: tuple[int, float, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the row of a step, and the means of the metrics since the last row.

        Args:
          before: step and clock values of the last row.
        """
        done, seconds = step - before[0], self._clock()[0] - before[1]
        # Means are NaN where no step was finite, and null in the file.
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
        """Writes the times so far, for a later start that continues from here."""
        if self._writer:
            self._writer.write(step, self._ledger.row())

    def _clock(self) -> tuple[float, float]:
        """Returns the seconds of training so far, and of all work after the start of a run."""
        row = self._ledger.row()
        training = row["time/train"] + row["time/data"]
        return training, training + row["time/evaluate"] + row["time/save"]


class Suspicion:
    """Detects implausible metrics in the first steps, a sign of wrong or missing labels.

    Args:
      classes: number of classes in the training split; 0: there are no labels.
    """

    def __init__(self, classes: int):
        self._classes, self._over = classes, False
        self._constant: float | None = None  # Accuracy of all rows so far, if it is the same.

    def remark(self, means: dict[str, float], images: int) -> str | None:
        """Returns a remark, once, if the loss is 0 or the accuracy always 0 or always 1 so far.

        Args:
          means: means of the metrics since the last row.
          images: number of images trained on since the first step.
        """
        if self._over:
            return None
        first, accuracy = self._constant is None, means.get("accuracy")
        self._over = not first and accuracy != self._constant or accuracy not in (0.0, 1.0)
        self._constant = accuracy
        # The probability that chance predicts none of these correctly is below 1 in 20,000.
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
