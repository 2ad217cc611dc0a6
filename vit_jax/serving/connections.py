"""Limits that uvicorn lacks: number of open connections, and timeouts of requests."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from uvicorn.protocols.http.h11_impl import H11Protocol

REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"Retry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


class ConnectionLimits(NamedTuple):
    """The limits of a server."""

    most: int  # Maximum number of open connections.
    head: float  # Timeout in seconds for receiving the request line and headers.
    whole: float  # Timeout in seconds from the end of the headers until the response is sent.
    # Function that is called for each connection that is closed because of a limit.
    refused: Callable[[], None]


def limited(limits: ConnectionLimits) -> type[H11Protocol]:
    """Returns a subclass of uvicorn's protocol that enforces the limits."""

    class Limited(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport):
            super().connection_made(transport)
            if len(self.connections) > limits.most:
                limits.refused()
                transport.write(REFUSAL)
                transport.close()
                return
            self._expect_request()

        def on_response_complete(self):
            self._expect_request()
            # The timer for the next request must be set before this call, because the call may
            # already start that request.
            super().on_response_complete()

        def connection_lost(self, exc):
            if self._timer:
                self._timer.cancel()
            super().connection_lost(exc)

        def _expect_request(self):
            if self._timer:
                self._timer.cancel()
            self._timer = self.loop.call_later(limits.head, self._check_head)

        def _check_head(self):
            if self.cycle is None or self.cycle.response_complete:
                self._end()
            else:
                self._timer = self.loop.call_later(limits.whole, self._end)

        def _end(self):
            limits.refused()
            self.transport.abort()

    return Limited
