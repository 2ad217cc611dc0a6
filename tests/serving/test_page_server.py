"""The server of a live report, run in this process."""

import asyncio
import contextlib
import socket
import threading

from vit_jax.errors import UserError
from vit_jax.serving import page_server
from vit_jax.serving.page_server import page_server as start


def talk(requests, make=lambda: "<p>The page", idle=0):
    """Returns the responses to requests, and the number of threads.

    Args:
      make: returns the page.
      idle: the number of other open connections that send nothing.
    """

    async def all_of_them():
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        async with await start(make, listening), contextlib.AsyncExitStack() as silent:
            for _ in range(idle):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                silent.callback(writer.close)
            answers = []
            for request in requests:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request)
                try:
                    answers.append((await reader.read()).decode())
                # The connection was closed before everything was read.
                except ConnectionResetError:
                    answers.append("")
                writer.close()
            return answers, threading.active_count()

    return asyncio.run(all_of_them())


def get(path="/", host="localhost:8000"):
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


def test_silent_connections_use_no_thread_and_block_no_other():
    before = threading.active_count()
    (answer,), threads = talk([get()], idle=30)
    assert answer.startswith("HTTP/1.1 200 OK\r\n") and answer.endswith("\r\n\r\n<p>The page")
    assert "Content-Security-Policy: frame-ancestors 'none'\r\n" in answer
    assert threads <= before + 1


def test_more_connections_than_are_taken_are_closed(monkeypatch):
    monkeypatch.setattr(page_server, "MOST_CONNECTIONS", 3)
    assert talk([get()], idle=3)[0] == [""]


def test_other_requests_than_for_the_page_are_answered_with_the_reason():
    def fails():
        raise UserError("there is no run any more")

    requests = [get("/config.json"), get(host="evil.example"), b"x" * 20_000, b"\xff\xff\r\n\r\n"]
    nowhere, stranger, long, noise = talk(requests)[0]
    assert nowhere.startswith("HTTP/1.1 404 ") and stranger.startswith("HTTP/1.1 421 ")
    assert "The page" not in stranger and long == "" and noise.startswith("HTTP/1.1 404 ")
    (failed,), _ = talk([get()], fails)
    assert failed.startswith("HTTP/1.1 500 ") and failed.endswith("there is no run any more")
