"""Limits that uvicorn has not: how many connections are open, and how long a request may take to
come.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from uvicorn.protocols.http.h11_impl import H11Protocol

REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"Retry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


class ConnectionLimits(NamedTuple):
    """The limits of a server.

    Attributes:
      most: connections that are open at once.
      head: seconds in which a request's first lines must have come.
      whole: seconds after that in which the answer must have been taken.
      refused: is called for each connection that is ended.
    """

    most: int
    head: float
    whole: float
    refused: Callable[[], None]


def limited(limits: ConnectionLimits) -> type[H11Protocol]:
    """Makes the protocol of a server with these limits."""

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
            # Which begins with the next request where that is there.
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
