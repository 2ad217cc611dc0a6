"""The documentation's search finds the right page among its first results for common questions."""

import functools
import html
import os
import re
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote_plus

import pytest

from tests.system import browser

ROOT = Path(__file__).parents[1]
FIRST = 3  # The number of results that a phone displays without scrolling.

# Queries, and the page that answers each.
QUESTIONS = {
    "train on my own images": "docs/tutorials/train",
    "fine-tune a pretrained model": "docs/tutorials/finetune",
    "which model should I use": "docs/which_model",
    "resume a stopped run": "docs/fault_tolerance",
    "out of memory": "docs/problems",
    "load a timm checkpoint": "docs/checkpoints",
    "export to ONNX": "docs/export",
    "log to wandb": "docs/monitoring",
    "which learning rate": "docs/tutorials/finetune",
    "train on a TPU pod": "docs/pods",
    "class imbalance": "docs/finetuning",
    "early stopping": "docs/finetuning",
    "freeze the backbone": "docs/finetuning",
    "two-phase training": "docs/finetuning",
    "few images": "docs/finetuning",
    "learning rate finder": "docs/finetuning",
    "several GPUs": "docs/sharding",
    "mixed precision": "docs/sharding",
    "data augmentation": "docs/augmentation",
    "confusion matrix": "docs/monitoring",
    "segmentation": "docs/dense_prediction",
    "zero-shot": "docs/models",
    "citing": "README",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Serves the documentation on localhost and yields its address.

    The environment variable VIT_JAX_SITE names the folder of the built site, as in `.ci/run`.
    Without it, the site is built.
    """
    folder = os.environ.get("VIT_JAX_SITE")
    if not folder:
        pytest.importorskip("furo")
        folder = tmp_path_factory.mktemp("site")
        command = [
            sys.executable,
            "-m",
            "sphinx",
            "-q",
            "-c",
            str(ROOT / "docs"),
            str(ROOT),
            str(folder),
        ]
        subprocess.run(command, check=True)

    class Files(SimpleHTTPRequestHandler):
        def log_message(self, format, *arguments):
            """Suppresses the log of requests."""

        def do_GET(self):
            if self.path != "/questions":
                super().do_GET()
                return
            frames = "".join(
                f'<iframe src="/search.html?q={quote_plus(q)}"></iframe>' for q in QUESTIONS
            )
            script = """<script>
                const frames = [...document.querySelectorAll('iframe')];
                const read = frame => {
                    const found = frame.contentDocument.querySelector('.search-summary');
                    if (!found?.innerText) return null;
                    return [...frame.contentDocument.querySelectorAll('ul.search > li > a')].map(link =>
                        link.getAttribute('href'));
                };
                const wait = setInterval(() => {
                    const hits = frames.map(read);
                    if (hits.includes(null)) return;
                    clearInterval(wait);
                    document.body.innerHTML = hits.map(some => `<pre>${some.join(' ')}</pre>`).join('');
                }, 50);
            </script>"""
            body = f"<!doctype html><body>{frames}{script}".encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.slow
@browser.needed
def test_first_results_contain_the_right_page(site, tmp_path):
    hits = re.findall("<pre>(.*?)</pre>", browser.dom(f"{site}/questions", tmp_path))
    answers = {
        question: html.unescape(found).split()[:FIRST]
        for question, found in zip(QUESTIONS, hits, strict=True)
    }
    missed = {
        question: answers[question]
        for question, page in QUESTIONS.items()
        if not any(hit.partition(".html")[0] == page for hit in answers[question])
    }
    assert not missed
