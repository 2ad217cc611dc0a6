"""Tests of `hf://owner/name` against a local server that answers like the Hub."""

import http.server
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.hub_server import FakeHub
from vit_jax.errors import UserError
from vit_jax.interop.hub import download

GOLDEN = Path(__file__).parent / "golden" / "transformers_vit"
PREPROCESSOR = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
CONTENTS = {file.name: file.read_bytes() for file in GOLDEN.iterdir()}
CONTENTS["preprocessor_config.json"] = json.dumps(PREPROCESSOR).encode()


@pytest.fixture
def environment(tmp_path):
    """Returns environment variables with which huggingface_hub connects to our server."""
    hub = FakeHub({"someone/vit": CONTENTS, "someone/gated": CONTENTS})
    hub.gated.add("someone/gated")
    yield hub.environment(tmp_path / "hub")
    hub.server.shutdown()


def convert(environment, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "vit_jax.convert", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
    )


def test_a_model_of_the_hub_is_fetched_and_converted(environment, tmp_path):
    done = convert(
        environment, "hf://someone/vit", tmp_path / "out.npz", "--gelu=tanh", "--norm_epsilon=1e-6"
    )
    assert done.returncode == 0, done.stderr
    assert "of Transformers" in done.stdout and (tmp_path / "out.npz").exists()
    assert "there is no preprocessor_config.json" not in done.stdout


@pytest.mark.parametrize(
    ("source", "change", "words"),
    [
        (
            "hf://someone/else",
            {},
            r"there is no \S+/someone/else, or it is private; .*hf auth login",
        ),
        (
            "hf://someone/gated",
            {"HF_TOKEN": "hf_reads", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            r"its owner requires consent; give it at \S+/someone/gated, then log in here "
            r"with: hf auth login",
        ),
        (
            "hf://someone/vit",
            {"HF_HUB_OFFLINE": "1"},
            "HF_HUB_OFFLINE disables requests to the Hub: unset it",
        ),
        (
            "hf://someone/vit",
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "is not reached: look at the network",
        ),
    ],
)
def test_errors_about_downloads_are_one_line_with_a_remedy(
    source, change, words, environment, tmp_path
):
    done = convert(environment | change, source, tmp_path / "out.npz")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert re.search(f"cannot fetch {source}: .*{words}", done.stderr)


REPOSITORY = {"id": "someone/vit", "siblings": [{"rfilename": "config.json"}]}
ANSWERS = {
    "a login page": b"<html>Log in to this network</html>",
    "half an answer": json.dumps(REPOSITORY).encode()[:-20],
    "a commit that leads elsewhere": json.dumps(
        REPOSITORY | {"sha": "../../../elsewhere"}
    ).encode(),
    "no commit": json.dumps(REPOSITORY | {"sha": None}).encode(),
    "a number for a commit": json.dumps(REPOSITORY | {"sha": 5}).encode(),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_errors_about_invalid_answers_of_the_hub_are_one_line(answer, monkeypatch, tmp_path):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(ANSWERS[answer])))
            self.end_headers()
            self.wfile.write(ANSWERS[answer])

        def log_message(self, format, *arguments):
            """Suppresses the log of requests."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        try:
            with pytest.raises(
                UserError, match="^cannot fetch hf://someone/vit: the answer from .* not the Hub"
            ):
                download("hf://someone/vit")
        finally:
            server.shutdown()
