"""The progress line: what training did since the last one, how fast, and how long it still takes."""

import time
from collections.abc import Callable

import jax

from vit_jax.errors import UserError
from vit_jax.parallel.chips import peak_flops
from vit_jax.training.checkpoint import Checkpoints
from vit_jax.training.progress import Console, MetricWriter, duration


class TrainLog:
    """Turns sums of metrics into a line and a row; a line is fetched only after the next step began.

    Args:
      images: in the training split; multiply_adds: of one image's forward pass.
      first_step: the step the run starts after.
    """

    def __init__(
        self,
        *,
        steps: int,
        first_step: int,
        batch_size: int,
        images: int,
        multiply_adds: int,
        schedule: Callable,
        checkpoints: Checkpoints,
        console: Console,
        writer: MetricWriter | None,
    ):
        self._steps, self._batch_size, self._images = steps, batch_size, images
        self._multiply_adds, self._schedule = multiply_adds, schedule
        self._checkpoints, self._console, self._writer = checkpoints, console, writer
        self._peak = peak_flops(jax.devices()[0].device_kind)
        self._pending = None
        self._logged = self._begun = first_step
        self._seconds = self._elapsed = 0.0  # Training time since the last line; all time.
        self._since = self._start = None

    def resume_clock(self, step: int) -> None:
        """From here on time counts as training time; at the first call, after compilation."""
        self._since = time.perf_counter()
        if self._start is None:
            self._start, self._begun, self._logged = self._since, step, step

    def pause_clock(self) -> None:
        """What follows is not training: evaluation."""
        self._seconds += time.perf_counter() - self._since
        self._since = None

    def take(self, step: int, metrics: dict) -> None:
        """Hands over the sums at a log step, still on the devices."""
        self._pending = step, metrics

    def check(self, metrics: dict) -> None:
        """Raises UserError when a step since the last line had a loss or gradient that is not finite."""
        if step := int(metrics["nonfinite_step"]):
            raise UserError(
                f"the loss or the gradient is not finite at step {step}; {self._checkpoints.last_good}; "
                "try a lower optimizer.learning_rate or a longer warm-up, or look at the data"
            )

    def flush(self) -> None:
        """Writes what was handed over, if anything.

        Raises:
          UserError: a loss was not finite.
        """
        if self._pending is None:
            return
        (step, sums), self._pending = self._pending, None
        sums = jax.device_get(sums)
        self.check(sums)
        now = time.perf_counter()
        seconds, self._seconds = self._seconds + now - self._since, 0.0
        self._since = now
        done, self._logged = step - self._logged, step

        means = {name: float(sums[name] / sums["steps"]) for name in ("loss", "accuracy", "gradient_norm")}
        row = {"epoch": step * self._batch_size / self._images}
        row |= {f"train/{name}": value for name, value in means.items()}
        row["train/learning_rate"] = float(self._schedule(step))
        line = f"step {step}/{self._steps} | epoch {row['epoch']:.1f} | loss {means['loss']:.4f} | "
        line += f"accuracy {means['accuracy']:.1%} | lr {row['train/learning_rate']:.2e}"
        if done:
            speed = done * self._batch_size / seconds
            row["train/images_per_second"] = speed
            line += f" | {speed:,.0f} images/s ({speed / jax.device_count():,.0f} a device)"
            if self._peak:
                # A multiply-add is 2 operations; the backward pass costs twice the forward.
                row["train/mfu"] = 6 * self._multiply_adds * speed / (self._peak * jax.device_count())
                line += f" | MFU {row['train/mfu']:.1%}"
            left = (now - self._start) / (step - self._begun) * (self._steps - step)
            line += f" | {duration(left)} left"
        self._console.status(line)
        if self._writer:
            self._writer.write(step, row)
