"""Stops a run cleanly when its machine is preempted or the user presses Ctrl-C."""

import signal
import threading

# Holds JAX's preemption service.
from jax._src import distributed


class StopSignal:
    """Context manager that records SIGTERM and the first SIGINT, so that a run can save and stop.

    In runs with several processes JAX's preemption service handles SIGTERM. All processes stop at
    the same count of queries: one more than the largest count of any process. Orbax's preemption
    policy would query the same service with step numbers, in every save and sometimes for an
    earlier step. The count would jump and the stop would be missed, so the service is hidden from
    Orbax.
    """

    def __enter__(self):
        self._stopping, self._interrupted, self._asked = False, False, 0
        handled = (signal.SIGTERM, signal.SIGINT)
        if threading.current_thread() is not threading.main_thread():
            handled = ()  # Python sets signal handlers only in the main thread.
        self._previous = {number: signal.getsignal(number) for number in handled}
        self._service = distributed.global_state.preemption_sync_manager
        distributed.global_state.preemption_sync_manager = None
        for number in self._previous:
            if number == signal.SIGINT or self._service is None:
                signal.signal(number, self._note)
        return self

    def __exit__(self, *_):
        distributed.global_state.preemption_sync_manager = self._service
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def reached(self) -> bool:
        """Returns True if the run must stop now; all processes call this at the same places."""
        if self._service is not None and not self._stopping:
            self._asked += 1
            self._stopping = self._service.reached_sync_point(self._asked)
        return self._stopping

    def _note(self, number, frame):
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        if self._service is None:
            self._stopping = True
        else:
            # JAX's service handles this signal and notifies the other processes.
            signal.raise_signal(signal.SIGTERM)
