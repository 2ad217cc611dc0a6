"""Profiler trace of some training steps for XProf (TensorBoard's profiler)."""

from collections.abc import Callable
from pathlib import Path

import jax


class Trace:
    """Context manager that writes a profiler trace of some steps (None: no trace) to a folder."""

    def __init__(self, steps: range | None, folder: Path, log: Callable[[str], None]):
        self._steps, self._folder, self._log = steps or (), folder, log
        self._running = False

    def before(self, step: int) -> None:
        """Starts the trace if `step` is the first traced step. Must be called before the step."""
        if self._steps and step == self._steps[0]:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int, results) -> None:
        """Ends the trace if `step` is the last traced step, after waiting for its `results`."""
        if self._running and step == self._steps[-1]:
            jax.block_until_ready(results)
            self._stop()
            self._log(
                f"trace of steps {self._steps[0]} to {step}: xprof {self._folder} (pip install "
                "xprof)"
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._running:
            self._stop()

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._running = False
