"""Web server for a single page, which is rendered for each request."""

import asyncio
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

from vit_jax.errors import UserError
from vit_jax.serving.hosts import is_ours

MOST_CONNECTIONS = 64  # Maximum number of open connections. Further connections are closed.
# Timeouts in seconds: for receiving the request line and headers, and for sending the response.
HEAD_SECONDS, ANSWER_SECONDS = 10, 60
MOST_HEAD = 2**14  # Maximum size of request line and headers, in bytes.
# Exceptions that close a connection without a response. CancelledError is included because asyncio
# would log it when the server stops.
LEFT = (
    *(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, TimeoutError),
    asyncio.CancelledError,
)


async def page_server(make: Callable[[], str], listening: socket.socket) -> asyncio.Server:
    """Starts a server that responds to each request with a newly rendered page.

    It runs in the event loop, without a thread for each connection. A connection is closed after
    the response.

    Args:
      make: returns the HTML of the page. It is never called twice at the same time. If it raises
        UserError, the response is the error message.
      listening: the socket on which the server listens.
    """
    maker = ThreadPoolExecutor(1, "page")
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            if connections <= MOST_CONNECTIONS:
                async with asyncio.timeout(HEAD_SECONDS):
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                loop = asyncio.get_running_loop()
                writer.write(await loop.run_in_executor(maker, _answer, head, make))
                async with asyncio.timeout(ANSWER_SECONDS):
                    await writer.drain()
        except LEFT:
            pass
        finally:
            connections -= 1
            writer.close()

    return await asyncio.start_server(answer, sock=listening, limit=MOST_HEAD)


def _answer(head: str, make: Callable[[], str]) -> bytes:
    """Returns the response to a request; `head` is the request line and headers."""
    request, *lines = head.split("\r\n")
    hosts = [line[5:].strip() for line in lines if line.lower().startswith("host:")]
    if not all(map(is_ours, hosts)):
        words = "this page is only for this machine: use localhost"
        return _response(HTTPStatus.MISDIRECTED_REQUEST, words)
    if not re.fullmatch(r"GET / HTTP/1\.[01]", request):
        return _response(HTTPStatus.NOT_FOUND, "there is one page: /")
    try:
        return _response(HTTPStatus.OK, make())
    except UserError as error:
        return _response(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))


def _response(status: HTTPStatus, text: str) -> bytes:
    body = text.encode(errors="backslashreplace")
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: text/{'html' if status == HTTPStatus.OK else 'plain'}; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Content-Security-Policy: frame-ancestors 'none'",
        "X-Content-Type-Options: nosniff",
        "Cache-Control: no-store",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + body
