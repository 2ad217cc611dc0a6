"""The command `vit_jax.serve`, with valid, invalid and malicious requests."""

import base64
import contextlib
import http.client
import io
import json
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.conftest import HANG, python_path
from tests.system.conftest import ROOT
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources.digits import digits
from vit_jax.inspection.attention_maps import of_patches, rollout

pytestmark = pytest.mark.slow  # Each test starts processes, or compiles for seconds.

SMALL = (
    "--port=0",
    "--batch_size=4",
    "--queue=4",
    "--max_mb=0.5",
    "--max_megapixels=1",
    "--top=10",
)
CONNECTIONS = 20


class Server:
    """A process of the command and its port."""

    def __init__(self, run, folder: Path, *arguments):
        command = [sys.executable, "-m", "vit_jax.serve", *map(str, arguments)]
        temporary = folder / "temporary"
        temporary.mkdir()
        environment = {
            "PYTHONPATH": python_path(ROOT),
            "JAX_LOG_COMPILES": "1",
            "TMPDIR": str(temporary),
        }
        self.written = lambda: list(temporary.iterdir())
        self.errors = folder / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=temporary,
                env=run.environment | environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.said = []
        for line in self.process.stdout:
            self.said.append(line)
            if found := re.match(r"serving on http://localhost:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            raise AssertionError(self.errors.read_text()[-2000:])
        self.started = self.errors.stat().st_size

    def ask(self, path, body=None, **headers):
        """Sends a request, and returns status, headers and text of the response."""
        connection = http.client.HTTPConnection("localhost", self.port, timeout=HANG)
        with contextlib.closing(connection):
            connection.request("POST" if body is not None else "GET", path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()

    def predict(self, image, query=""):
        """Sends an image, and returns the parsed response."""
        status, _, text = self.ask(f"/predict{query}", image)
        assert status == 200, text
        return json.loads(text)

    def connect(self):
        """Opens a TCP connection."""
        return socket.create_connection(("localhost", self.port), timeout=HANG)

    def close(self):
        """Kills the process."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder of digits.

    There are PNG files, one of them transparent, and a JPEG file with an EXIF rotation.
    """
    folder = tmp_path_factory.mktemp("images")
    source = digits("test")
    for index in range(6):
        image = Image.fromarray(source[index].image)
        if index == 4:
            image.putalpha(image.convert("L").point(lambda level: 255 * (level > 60)))
        image.save(folder / f"{index}.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(source[7].image).resize((40, 60)).save(folder / "turned.jpg", exif=turned)
    return folder


@pytest.fixture(scope="module")
def server(run, finished, folder, tmp_path_factory):
    server = Server(
        run,
        tmp_path_factory.mktemp("server"),
        finished,
        *SMALL,
        "--timeout=4",
        f"--connections={CONNECTIONS}",
        f"--neighbours={folder}",
    )
    yield server
    server.close()


def encoded(image: Image.Image, kind: str) -> bytes:
    held = io.BytesIO()
    image.save(held, kind)
    return held.getvalue()


def test_probabilities_are_those_of_predict(server, run, finished, folder):
    printed = run(
        f"--checkpoint={finished}", "--json", "--top=10", folder, module="vit_jax.predict"
    ).stdout
    wanted = {row["path"]: row["predictions"] for row in map(json.loads, printed.splitlines())}
    assert len(wanted) == 7
    for path, predictions in wanted.items():
        found = server.predict(Path(path).read_bytes())["predictions"]
        assert [each["class"] for each in found] == [each["class"] for each in predictions]
        chances = [[each["probability"] for each in rows] for rows in (found, predictions)]
        np.testing.assert_allclose(*chances, rtol=1e-5)


def test_several_images_of_one_request_are_answered_in_their_order(server, folder):
    images = [path.read_bytes() for path in sorted(folder.glob("*.png"))[:4]]
    body = json.dumps({"images": [base64.b64encode(image).decode() for image in images]})
    _, _, text = server.ask("/predict", body, **{"Content-Type": "application/json"})
    results = json.loads(text)["results"]
    for image, result in zip(images, results, strict=True):
        alone = server.predict(image)
        assert [row["class"] for row in alone["predictions"]] == [
            row["class"] for row in result["predictions"]
        ]
    with_text = {"images": [base64.b64encode(content).decode() for content in (images[0], b"text")]}
    status, _, text = server.ask(
        "/predict", json.dumps(with_text), **{"Content-Type": "application/json"}
    )
    assert (status, json.loads(text)["error"][:9]) == (422, "image 2: ")


def test_heat_is_the_models_rollout(server, folder, finished):
    heat = server.predict((folder / "2.png").read_bytes(), "?heat=1")["heat"]
    model = vit_jax.load_model(finished, log=str)
    image = TestCrop(16, "short_side", 16)(np.asarray(Image.open(folder / "2.png")))
    _, found = jax.jit(lambda images: model(images, capture=("attention",)))(image[None])
    wanted = of_patches(model, rollout(found["attention"])[-1])[0]
    np.testing.assert_allclose(heat["weights"], wanted, rtol=1e-4)


def test_nearest_image_is_the_same_one(server, folder):
    for path in sorted(folder.iterdir())[:3]:
        first, second = server.predict(path.read_bytes(), "?neighbours=2")["neighbours"]
        assert first["path"] == path.name and first["similarity"] == pytest.approx(1, abs=1e-4)
        assert second["similarity"] < first["similarity"]
        picture = base64.b64decode(first["picture"].partition(",")[2])
        assert Image.open(io.BytesIO(picture)).size == (16, 16)


NOISE = np.random.default_rng(0).integers(256, size=(200, 200, 3), dtype=np.uint8)
JSON = {"Content-Type": "application/json"}
REFUSED = {
    "text": ("", b"not an image", {}, 422, "not a readable image"),
    "half a JPEG": (
        "",
        encoded(Image.fromarray(NOISE), "JPEG")[:9000],
        {},
        422,
        "damaged or truncated",
    ),
    "a bomb": ("", encoded(Image.new("L", (20_000, 20_000)), "PNG"), {}, 413, "far more"),
    "a small bomb": ("", encoded(Image.new("L", (2000, 2000)), "PNG"), {}, 413, "has 2000x2000"),
    "too many bytes": ("", bytes(2_000_000), {}, 413, "0.5 MB"),
    "nothing": ("", b"", {}, 400, "no body"),
    "a form": (
        "",
        b"--x",
        {"Content-Type": "multipart/form-data; boundary=x"},
        415,
        "curl --data-binary",
    ),
    "other JSON": ("", b'{"image": 1}', JSON, 400, "the JSON must be"),
    "deep JSON": ("", b"[" * 100_000, JSON, 400, "the JSON must be"),
    "no base64": ("", b'{"images": ["?"]}', JSON, 400, "the JSON must be"),
    "too many images": ("", b'{"images": ["", "", "", "", ""]}', JSON, 400, "1 to 4 images"),
    "another question": ("?heats=1", b"x", {}, 400, "'heats' is an unknown parameter"),
    "too many neighbours": ("?neighbours=1000", b"x", {}, 400, "0 to 24"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_requests_are_rejected_in_one_line(server, what):
    query, body, headers, wanted, words = REFUSED[what]
    status, _, text = server.ask(f"/predict{query}", body, **headers)
    assert status == wanted
    assert words in json.loads(text)["error"] and "\n" not in text


def test_requests_above_the_capacity_wait_or_are_rejected_for_now(server):
    image = base64.b64encode(encoded(Image.fromarray(NOISE), "PNG")).decode()
    body = json.dumps({"images": [image] * 2})
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(server.ask, "/predict", body, **JSON) for _ in range(48)]
        answers = [each.result() for each in asked]
    assert {status for status, _, _ in answers} <= {200, 503}
    for status, headers, text in answers:
        assert (
            headers["Retry-After"] == "1"
            if status == 503
            else len(json.loads(text)["results"]) == 2
        )


def test_slow_clients_are_ended_and_others_served_meanwhile(server, folder):
    with server.connect() as head, server.connect() as body:
        head.sendall(b"POST /predict HT")
        body.sendall(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nsome"
        )
        assert server.predict((folder / "2.png").read_bytes())
        with contextlib.suppress(ConnectionResetError):
            assert head.recv(1000) == b""
        assert body.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_connections_above_the_limit_are_refused_and_later_ones_served(server, folder):
    with contextlib.ExitStack() as opened:
        for _ in range(CONNECTIONS):
            opened.enter_context(server.connect())
        for _ in range(10):
            with server.connect() as more:
                assert more.recv(1000).startswith(b"HTTP/1.1 503 ")
    while server.ask("/health")[0] != 200:
        time.sleep(0.05)
    assert server.predict((folder / "2.png").read_bytes())


def test_page_needs_no_other_server_and_sends_a_supported_query(server, folder):
    status, headers, text = server.ask("/")
    assert status == 200 and headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert 'http-equiv="Content-Security-Policy" content="default-src' in text
    assert not re.search(r"""(src|href)=["'](?!data:)|https?://|@import|url\(""", text)
    query = json.loads(re.search(r'const query = ("[^"]+")', text)[1])
    answer = server.predict((folder / "2.png").read_bytes(), f"?{query}")
    for name in ("predictions", "seen", "heat", "neighbours"):
        assert answer[name] and f".{name}" in text


def test_health_and_metrics_describe_the_server(server, folder):
    def classified():
        status, headers, text = server.ask("/metrics")
        assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return float(re.search(r"(?m)^vit_jax_images_total (\S+)$", text)[1])

    health = json.loads(server.ask("/health")[2])
    assert health["status"] == "ok" and health["classes"] == 10 and health["image_size"] == [16, 16]
    before = classified()
    server.predict((folder / "2.png").read_bytes())
    assert classified() == before + 1
    assert server.ask("/nowhere")[0] == 404 and server.ask("/predict")[0] == 405


def test_nothing_is_compiled_or_written_while_serving(server, folder):
    body = json.dumps({"images": [base64.b64encode((folder / "1.png").read_bytes()).decode()] * 3})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: server.ask("/predict", body, **JSON), range(16)))
    server.predict((folder / "turned.jpg").read_bytes(), "?heat=1&seen=1&neighbours=3")
    errors = server.errors.read_text()
    assert "Finished XLA compilation" in errors[: server.started]
    assert errors[server.started :] == ""
    assert any(line.startswith("compiling for batches of up to 4 images") for line in server.said)
    assert server.written() == []


def test_termination_finishes_running_requests(run, finished, folder, tmp_path):
    server = Server(run, tmp_path, finished, *SMALL)
    image = (folder / "2.png").read_bytes()
    with contextlib.closing(server), server.connect() as begun, server.connect():
        head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(image)}\r\n\r\n"
        begun.sendall(head.encode() + image[:100])
        # When the server answers this request, it has read the earlier bytes.
        server.ask("/health")
        server.process.send_signal(signal.SIGTERM)
        while True:  # Until the server accepts no more connections.
            try:
                server.connect().close()
            except ConnectionRefusedError:
                break
        begun.sendall(image[100:])
        answer = b"".join(iter(lambda: begun.recv(10_000), b""))  # Until the connection is closed.
        assert answer.startswith(b"HTTP/1.1 200 OK") and b"predictions" in answer
        assert server.process.wait(HANG) == 0
        assert "ended" in server.process.stdout.read()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one checkpoint"),
        (["nowhere"], "nowhere"),
        (["{finished}", "--queue=2"], "--queue=2 is less than a batch: give 16 or more"),
        (["{finished}", "--neighbours=nowhere"], "--neighbours=nowhere is not a folder"),
        (["{finished}", "--host=300.1.1.1"], "give another --port, or --host"),
    ],
)
def test_mistake_is_one_line(run, finished, arguments, words):
    given = [argument.format(finished=finished) for argument in arguments]
    result = run("--port=0", *given, module="vit_jax.serve")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and words in line


def test_full_port_is_one_line_with_the_remedy(run, finished):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run(finished, f"--port={port}", module="vit_jax.serve")
    assert result.returncode == 2 and result.stdout == ""
    wanted = (
        f"error: cannot listen on 127.0.0.1, port {port} (Address already in use): give another "
        "--port"
    )
    assert result.stderr.startswith(wanted) and result.stderr.count("\n") == 1


def test_missing_library_is_one_line_with_the_remedy(run, finished, tmp_path):
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError('none', name='uvicorn')")
    result = run(finished, module="vit_jax.serve", PYTHONPATH=python_path(tmp_path, ROOT))
    assert result.returncode == 2
    remedy = "pip install starlette uvicorn prometheus_client"
    assert result.stderr == f"error: uvicorn is not installed: {remedy}\n"
