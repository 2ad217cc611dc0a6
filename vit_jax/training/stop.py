"""Leaving in good order when the machine is taken away or the user presses Ctrl-C."""

import signal

import jax
from jax.experimental import multihost_utils


class StopSignal:
    """While it is entered, SIGTERM and the first SIGINT are noted instead of obeyed.

    Of several processes JAX's preemption service has SIGTERM: it tells all of them, and names a step
    that none has begun yet. It is what Orbax's preemption policy asks too.
    """

    def __enter__(self):
        self._several = jax.process_count() > 1
        self._received, self._asked = False, 0
        self._previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        if not self._several:
            signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def received(self) -> bool:
        """Whether to stop at once; of several processes none may do so by itself."""
        return self._received and not self._several

    def reached(self) -> bool:
        """Whether all processes are to stop now; all ask after every step."""
        if not self._several:
            return self._received
        # Counted from the start of the process: JAX has them stop at the number after the highest that
        # one has reached, exactly, so a signal before the first step of a run that goes on would be lost.
        self._asked += 1
        return multihost_utils.reached_preemption_sync_point(self._asked)

    def _note(self, number, frame):
        if self._received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = True
        if self._several:
            signal.raise_signal(signal.SIGTERM)
