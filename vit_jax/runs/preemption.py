"""Preemption: a run leaves in good order when its machine is taken away or the user presses
Ctrl-C.
"""

import signal
import threading

from jax._src import distributed  # JAX keeps its preemption service there.


class StopSignal:
    """A context in which SIGTERM and the first SIGINT are noted instead of obeyed.

    In runs of several processes JAX's preemption service has SIGTERM. It makes all of them stop
    after the
    same number of questions: one more than the most that any had asked. It is the
    service that Orbax's preemption policy asks too, but with the step's number, in every save and
    sometimes of a step that is over. The count would jump and the stop be missed, so Orbax does not
    get to see the service.
    """

    def __enter__(self):
        self._stopping, self._interrupted, self._asked = False, False, 0
        handled = (signal.SIGTERM, signal.SIGINT)
        if threading.current_thread() is not threading.main_thread():
            handled = ()  # A program's own thread, in which Python sets no handlers.
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
        """True where the run is to stop now; all processes ask at the same places."""
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
            signal.raise_signal(signal.SIGTERM)  # The service's: it tells the others.
