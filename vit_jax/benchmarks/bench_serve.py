"""Load test of the server: images/s and latency with several clients."""

import contextlib
import http.client
import itertools
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from vit_jax.benchmarks.bench_input import make_photographs
from vit_jax.benchmarks.figures import Table
from vit_jax.errors import UserError
from vit_jax.models import create_model
from vit_jax.save import save_model

PEERS = ("onnxruntime",)
CLIENTS, PHOTOGRAPHS, WARM_SECONDS = (1, 4, 16), 64, 3


class Asked(NamedTuple):
    """Results of all requests of one or several clients."""

    seconds: list[float]  # Latency of each request.
    lost: int  # Number of requests with an error or without a response.


def measure(
    models: Sequence[str], image_size: int, seconds: float, against: Sequence[str] = ()
) -> dict:
    """Prints and returns images/s, latency and lost requests, for several numbers of clients.

    The server has a model with random parameters. It runs in a separate process on the same machine
    as the clients. The measurements of several servers alternate.

    Args:
      seconds: duration of each measurement.
      against: `onnxruntime` compares with a minimal server for timm's model in ONNX Runtime.
    """
    columns = {"images/s": ",.1f", "p50, ms": ",.0f", "p99, ms": ",.0f", "lost": "d"}
    table = Table("model, clients", columns | {"images a batch": ".1f"})
    with tempfile.TemporaryDirectory() as folder:
        make_photographs(Path(folder), PHOTOGRAPHS)
        photographs = [path.read_bytes() for path in sorted(Path(folder).rglob("*.jpg"))]
        for number, name in enumerate(models):
            model = create_model(name, num_classes=1000, image_size=image_size)
            checkpoint = save_model(model, Path(folder) / f"{number}.npz", log=lambda line: None)
            commands = {name: ["vit_jax.serve", str(checkpoint), "--port=0"]}
            for peer in against:
                module = f"vit_jax.benchmarks.{peer}_server"
                commands[f"{name}, {peer}"] = [module, name, str(image_size)]
            with contextlib.ExitStack() as stack:
                urls = {}
                for title, command in commands.items():
                    with table.skipping(title):
                        urls[title] = stack.enter_context(_server(command))
                for clients, (title, url) in itertools.product(CLIENTS, urls.items()):
                    values = _values(url, photographs, clients, seconds)
                    table.row(f"{title}, {clients}", *values)
    return table.figures


@contextlib.contextmanager
def _server(command: Sequence[str]) -> Iterator[str]:
    """Starts the server of a module with its arguments, and yields its address."""
    server = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if found := re.match(r"serving on http://([^,\s]+)", line):
                yield found[1]
                break
        else:
            raise UserError(f"the server {command[0]} did not start")
    finally:
        server.terminate()
        code = server.wait()
    if code not in (0, -signal.SIGTERM):
        raise UserError(f"the server ended with exit code {code}")


def _load(url: str, photographs: list[bytes], clients: int, seconds: float) -> Asked:
    """Sends requests for some seconds; each client waits for a response before its next request."""
    until = time.perf_counter() + seconds

    def ask(client: int) -> Asked:
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
        return Asked(waited, lost)

    with ThreadPoolExecutor(clients) as pool:
        each = [*pool.map(ask, range(clients))]
    return Asked([second for one in each for second in one.seconds], sum(one.lost for one in each))


def _batches(url: str) -> list[float]:
    """Returns how many images and batches a server has computed, or [] without /metrics."""
    try:
        with urllib.request.urlopen(f"http://{url}/metrics") as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError:
        return []
    pattern = r"(?m)^vit_jax_batch_images_{} (\S+)$"
    found = (re.search(pattern.format(name), text) for name in ("sum", "count"))
    return [float(match[1]) for match in found if match]


def _values(
    url: str, photographs: list[bytes], clients: int, seconds: float
) -> tuple[float | None, ...]:
    """Loads a server, and returns the values of the table's row."""
    _load(url, photographs, clients, WARM_SECONDS)
    before = _batches(url)
    asked = _load(url, photographs, clients, seconds)
    computed = [x - y for x, y in zip(_batches(url), before, strict=True)]
    if len(asked.seconds) < 2:
        raise UserError(f"{len(asked.seconds)} requests in {seconds} s: give more --seconds")
    cuts = statistics.quantiles(asked.seconds, n=100)
    together = computed[0] / computed[1] if computed else None
    speed = len(asked.seconds) / seconds
    return speed, 1e3 * cuts[49], 1e3 * cuts[98], asked.lost, together
