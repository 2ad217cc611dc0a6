"""Stops a run after a checkpoint when its machine is preempted or the user presses Ctrl-C."""

import signal
import threading

# The module with JAX's preemption service, which has no public name.
from jax._src import distributed


class StopSignal:
    """Context manager that records SIGTERM and the first SIGINT. The run then saves and stops.

    In runs with several processes, JAX's preemption service handles SIGTERM. Each process passes
    the number of its calls of `reached` to the service. After a signal, the service chooses a
    number: the largest number of any process, plus one. Each process stops when it reaches this
    number, so all processes stop at the same step.

    The service is hidden from Orbax, because Orbax's preemption policy also queries the service in
    every save. Orbax would pass the step instead of the number of calls, and the run would miss the
    signal.
    """

    def __enter__(self):
        self._stopping, self._interrupted, self._queries = False, False, 0
        handled = (signal.SIGTERM, signal.SIGINT)
        if threading.current_thread() is not threading.main_thread():
            handled = ()  # Python can set signal handlers only in the main thread.
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
        """Returns True if the run must stop now. All processes must call this once per step."""
        if self._service is not None and not self._stopping:
            self._queries += 1
            self._stopping = self._service.reached_sync_point(self._queries)
        return self._stopping

    def _note(self, number, frame):
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        if self._service is None:
            self._stopping = True
        else:
            # JAX's preemption service handles this signal and notifies all other processes.
            signal.raise_signal(signal.SIGTERM)
