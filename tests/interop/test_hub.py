"""`hf://owner/name`, against a server on this machine that answers as the Hub does."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden" / "transformers_vit"
PREPROCESSOR = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
CONTENTS = {file.name: file.read_bytes() for file in GOLDEN.iterdir()}
CONTENTS["preprocessor_config.json"] = json.dumps(PREPROCESSOR).encode()
COMMIT = "0" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """One repository, `someone/vit`."""

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool):
        if self.path.startswith("/api/models/someone/vit/tree/"):
            listing = [
                dict(type="file", path=name, size=len(content), oid=COMMIT)
                for name, content in CONTENTS.items()
            ]
            content, name = json.dumps(listing).encode(), "listing"
        elif self.path.startswith("/api/models/someone/vit/"):
            listing = dict(id="someone/vit", sha=COMMIT, siblings=[dict(rfilename=name) for name in CONTENTS])
            content, name = json.dumps(listing).encode(), "listing"
        elif self.path.startswith("/someone/vit/resolve/") and (name := self.path.split("/")[-1]) in CONTENTS:
            content = CONTENTS[name]
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def environment(tmp_path):
    """What makes huggingface_hub ask our server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    server.shutdown()


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


@pytest.mark.slow
def test_a_model_that_is_not_on_the_hub_is_named(environment, tmp_path):
    done = convert(environment, "hf://someone/else", tmp_path / "out.npz")
    assert done.returncode == 2
    assert "cannot fetch hf://someone/else" in done.stderr and done.stderr.count("\n") == 1
