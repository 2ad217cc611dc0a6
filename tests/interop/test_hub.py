"""`hf://owner/name`, against a server on this machine that answers as the Hub does."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub_server import FakeHub

GOLDEN = Path(__file__).parent / "golden" / "transformers_vit"
PREPROCESSOR = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
CONTENTS = {file.name: file.read_bytes() for file in GOLDEN.iterdir()}
CONTENTS["preprocessor_config.json"] = json.dumps(PREPROCESSOR).encode()


@pytest.fixture
def environment(tmp_path):
    """What makes huggingface_hub ask our server."""
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
            r"its owner asks for consent; give it at \S+/someone/gated, then log in here with: hf auth login",
        ),
        ("hf://someone/vit", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids to ask the Hub: unset it"),
        ("hf://someone/vit", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "is not reached: look at the network"),
    ],
)
def test_what_cannot_be_fetched_is_one_line_with_the_remedy(source, change, words, environment, tmp_path):
    done = convert(environment | change, source, tmp_path / "out.npz")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert re.search(f"cannot fetch {source}: .*{words}", done.stderr)
