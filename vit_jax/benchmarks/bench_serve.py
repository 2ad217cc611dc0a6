"""Load test of the server: images/s and latency with several clients."""

import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

from vit_jax.benchmarks.bench_input import make_photographs
from vit_jax.errors import UserError
from vit_jax.models import create_model
from vit_jax.save import save_model

CLIENTS, PHOTOGRAPHS, WARM_SECONDS = (1, 4, 16), 64, 3


class Asked(NamedTuple):
    """Results of all requests of one or several clients."""

    seconds: list[float]  # Latency of each request.
    lost: int  # Number of requests with an error or without a response.


def measure(models: list[str], image_size: int, seconds: float) -> None:
    """Prints images/s, latency and the number of lost requests, for several numbers of clients.

    The server has a model with random parameters. It runs in a separate process on the same machine
    as the clients.

    Args:
      models: names of models.
      image_size: image size in pixels.
      seconds: duration of each measurement.
    """
    print("| model | clients | images/s | p50, ms | p99, ms | images a batch | lost |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        make_photographs(Path(folder), PHOTOGRAPHS)
        photographs = [path.read_bytes() for path in sorted(Path(folder).rglob("*.jpg"))]
        for number, name in enumerate(models):
            model = create_model(name, num_classes=1000, image_size=image_size)
            checkpoint = save_model(model, Path(folder) / f"{number}.npz", log=lambda line: None)
            server, url = _start(checkpoint)
            try:
                for clients in CLIENTS:
                    _load(url, photographs, clients, WARM_SECONDS)
                    before = _batches(url)
                    asked = _load(url, photographs, clients, seconds)
                    images, batches = (x - y for x, y in zip(_batches(url), before, strict=True))
                    print(_row(name, clients, asked, seconds, images / batches), flush=True)
            finally:
                server.terminate()
            if code := server.wait():
                raise UserError(f"the server ended with exit code {code}")


def _start(checkpoint: Path) -> tuple[subprocess.Popen, str]:
    """Starts a server for a checkpoint; returns its process and address."""
    command = [sys.executable, "-m", "vit_jax.serve", str(checkpoint), "--port=0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.match(r"serving on http://([^, ]+)", line):
            return server, found[1]
    raise UserError("the server did not start")


def _load(url: str, photographs: list[bytes], clients: int, seconds: float) -> Asked:
    """Sends requests from several clients for some seconds; returns the results.

    Each client sends its next request as soon as it has a response.
    """
    until = time.perf_counter() + seconds
    each = [Asked([], 0)] * clients

    def ask(client: int) -> None:
        waited, lost, turn = [], 0, client
        connection = http.client.HTTPConnection(url, timeout=60)
        while (started := time.perf_counter()) < until:
            try:
                connection.request("POST", "/predict", photographs[turn % len(photographs)])
                answer = connection.getresponse()
                right = "predictions" in json.loads(answer.read())
            except (OSError, http.client.HTTPException, ValueError):
                right = False
                connection.close()
            if right:
                waited.append(time.perf_counter() - started)
            else:
                lost += 1
            turn += clients
        connection.close()
        each[client] = Asked(waited, lost)

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Asked([second for one in each for second in one.seconds], sum(one.lost for one in each))


def _batches(url: str) -> tuple[float, float]:
    """Returns how many images and how many batches the server has computed, from its /metrics."""
    with urllib.request.urlopen(f"http://{url}/metrics") as answer:
        text = answer.read().decode()
    found = [
        re.search(rf"(?m)^vit_jax_batch_images_{name} (\S+)$", text) for name in ("sum", "count")
    ]
    images, batches = (float(match[1]) for match in found if match)
    return images, batches


def _row(name: str, clients: int, asked: Asked, seconds: float, together: float) -> str:
    if len(asked.seconds) < 2:
        raise UserError(
            f"{name} answered {len(asked.seconds)} of {clients} clients: give more --seconds"
        )
    cuts = statistics.quantiles(asked.seconds, n=100)
    figures = f"{len(asked.seconds) / seconds:,.1f} | {1e3 * cuts[49]:,.0f} | {1e3 * cuts[98]:,.0f}"
    return f"| {name} | {clients} | {figures} | {together:.1f} | {asked.lost} |"
