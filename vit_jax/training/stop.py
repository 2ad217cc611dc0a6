"""Leaving in good order when the machine is taken away or the user presses Ctrl-C."""

import signal

import jax
from jax.experimental import multihost_utils


class StopSignal:
    """While it is entered, SIGTERM and the first SIGINT are noted instead of obeyed."""

    def __enter__(self):
        self._received = False
        self._previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        if jax.process_count() == 1:  # Else JAX's own notifier has SIGTERM, and tells all processes.
            signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def reached(self, step: int) -> bool:
        """Whether all processes are to stop after this step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received

    def _note(self, number, frame):
        if self._received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = True
