"""The command `vit_jax.push`, with a local server that replaces the Hugging Face Hub."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.hub_server import FakeHub
from tests.system.conftest import ROOT
from tests.system.test_depth import config_of_scenes, write_scenes
from vit_jax.publishing.run_facts import without_folders

pytestmark = pytest.mark.slow  # Each test starts processes, or compiles for seconds.

# Processes that run a model card's code can import timm with this hook: see
# `tests.conftest.name_missing_operators`.
OPERATORS = """
import torch
from tests.conftest import name_missing_operators
name_missing_operators(torch)
"""


@pytest.fixture
def hub():
    of_another = {"config.json": b"{}", "preprocessor_config.json": b"{}", "notes.md": b"mine"}
    hub = FakeHub({"ada/taken": of_another})
    yield hub
    hub.server.shutdown()


@pytest.fixture
def push(hub, run, tmp_path):
    """Returns a function that runs the command, by default with an access token of the user ada."""

    def push(*arguments, token="hf_writes", path="", **more):
        environment = run.environment | hub.environment(tmp_path / "home", token) | more
        return subprocess.run(
            [sys.executable, "-m", "vit_jax.push", *map(str, arguments)],
            env=environment | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )

    return push


@pytest.fixture
def without_timm(tmp_path):
    """Returns a folder for the start of PYTHONPATH that hides timm and Transformers."""
    hook = "import importlib.util as util\nfind = util.find_spec\n"
    hook += (
        "util.find_spec = lambda name, *a: None if name in ('timm', 'transformers') else "
        "find(name, *a)\n"
    )
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(hook)
    return tmp_path / "without"


def blocks(card: str) -> dict[str, str]:
    """Returns the usage code of a model card by library."""
    return dict(re.findall(r"(?ms)^### (\w+)\n\n```python\n(.*?)^```$", card))


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("timm", "transformers"))), reason="needs both"
)
def test_an_uploaded_model_loads_in_each_library_by_the_code_of_its_card(
    finished, push, hub, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text(OPERATORS)
    done = push(finished, "ada/digits", "--licence=mit", path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"uploaded to {hub.endpoint}/ada/digits (private)"
    files = hub.repositories["ada/digits"]
    assert files.keys() == {".gitattributes", "README.md", "config.json", "model.safetensors"}
    lines = blocks(files["README.md"].decode())
    assert lines.keys() == {"timm", "Transformers", "vit_jax"}
    Image.fromarray(np.random.default_rng(5).integers(0, 256, (16, 16, 3), np.uint8)).save(
        tmp_path / "photo.jpg", "PNG"
    )
    # One process runs all of them, because importing the libraries takes most of the time.
    printed = subprocess.run(
        [sys.executable, "-c", "\n".join(lines.values())],
        env=hub.environment(tmp_path / "elsewhere", "hf_writes")
        | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert printed.returncode == 0, printed.stderr
    (expected,) = vit_jax.load_model(finished, log=str).predict(str(tmp_path / "photo.jpg"))
    timm, transformers, *_, own = printed.stdout.splitlines()
    assert timm == transformers == expected.classes[0]
    assert own.split("  ")[1:] == str(expected).split("  ")[1:]


def test_the_card_of_a_depth_run_loads_its_head(push, without_timm, tmp_path):
    config = config_of_scenes(write_scenes(tmp_path / "scenes"))
    config.data.test_crop, config.optimizer.warmup_steps = "square", 0
    config.steps = config.evaluate_every = 1
    vit_jax.train(config, tmp_path / "run")
    arguments = tmp_path / "run", "ada/depth", "--licence=mit", f"--dry_run={tmp_path / 'out'}"
    done = push(*arguments, path=without_timm)
    assert done.returncode == 0, done.stderr
    assert 'vit_jax.load_depth("hf://ada/depth")' in (tmp_path / "out" / "README.md").read_text()
    assert "ran the card's lines for vit_jax with the depth head" in done.stdout


def test_a_dry_run_writes_the_folder_and_its_card_without_requests(
    finished, push, hub, without_timm, tmp_path
):
    done = push(
        finished, "ada/digits", "--licence=mit", f"--dry_run={tmp_path / 'out'}", path=without_timm
    )
    assert done.returncode == 0, done.stderr
    assert not hub.requests and {*hub.repositories} == {"ada/taken"}
    assert {*os.listdir(tmp_path / "out")} == {"README.md", "config.json", "model.safetensors"}
    assert all(name in done.stdout for name in ("README.md", "config.json", "model.safetensors"))
    # Without the extra `parity`, PyTorch is also missing.
    assert "note: the card shows no lines for timm: not tried, since timm" in done.stdout
    card = (tmp_path / "out" / "README.md").read_text()
    assert blocks(card).keys() == {"vit_jax"}  # The code was run.
    head = card.split("---\n")[1]
    assert {"license: mit", "library_name: timm", "pipeline_tag: image-classification"} <= {
        *head.splitlines()
    }
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"| test accuracy | {last['test/accuracy']:.2%} |" in card
    assert "After step 40 of 40, of one run of seed 0." in card
    assert (
        "Test: split `test` of digits, 360 images." in card
        and "digits, split `train`: 1,437" in card
        and "passed by a program" not in card
    )
    assert "| model.dim | 16 |" in card and "| optimizer.warmup_steps | 5 |" in card
    again = push(finished, "ada/digits", "--licence=mit", f"--dry_run={tmp_path / 'out'}")
    assert again.returncode == 2 and "exists; give another --dry_run" in again.stderr


def test_the_lines_of_two_classes_are_run(push, without_timm, tmp_path):
    """The second class is more probable, so predictions list it first."""
    model = vit_jax.create_model("ViT-mu/16", num_classes=2, image_size=16)
    model.head.bias[...] = np.array([0.0, 1.0])
    vit_jax.save_model(model, tmp_path / "model", library="timm")
    out = tmp_path / "out"
    done = push(
        tmp_path / "model", "ada/two", "--licence=mit", f"--dry_run={out}", path=without_timm
    )
    assert done.returncode == 0, done.stderr
    assert "ran the card's lines for vit_jax: " in done.stdout


def test_replacing_a_model_deletes_the_files_of_the_old_one(
    finished, push, hub, without_timm, tmp_path
):
    run = tmp_path / "run"  # A run without class names.
    shutil.copytree(finished, run)
    said = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(said | dict(class_names=[])))
    done = push(run, "ada/taken", "--licence=mit", "--replace", path=without_timm)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"uploaded to {hub.endpoint}/ada/taken (public)"
    files = hub.repositories["ada/taken"]
    assert files.keys() == {"notes.md", "README.md", "config.json", "model.safetensors"}
    assert json.loads(files["config.json"])["label_names"] == [*"0123456789"]


@pytest.mark.parametrize(
    ("arguments", "token", "words"),
    [
        (["WORKDIR", "ada/digits"], "hf_writes", "give --licence=LICENCE"),
        (["WORKDIR", "digits", "--licence=mit"], "hf_writes", "give OWNER/NAME"),
        (
            ["WORKDIR", "ada/digits", "--licence=mit"],
            None,
            r"no token for http://127\S+: .*HF_TOKEN",
        ),
        (
            ["WORKDIR", "ada/digits", "--licence=mit"],
            "hf_no",
            "rejects this token: .*HF_TOKEN",
        ),
        (
            ["WORKDIR", "ada/digits", "--licence=mit"],
            "hf_reads",
            "of ada may only read: .*settings/tokens",
        ),
        (
            ["WORKDIR", "ada/taken", "--licence=mit"],
            "hf_writes",
            "is on the Hub already: .*--replace",
        ),
        (["nowhere", "ada/digits", "--licence=mit"], "hf_writes", "there is no .*nowhere"),
    ],
)
def test_mistakes_are_one_line_with_the_remedy(arguments, token, words, push, hub, tmp_path):
    arguments = [tmp_path if argument == "WORKDIR" else argument for argument in arguments]
    done = push(*arguments, token=token)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert re.search(words, done.stderr)
    assert {*hub.repositories} == {"ada/taken"}


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bob/digits", "--licence=mit"], "may not write to bob: .*settings/tokens"),
        (
            ["ada/digits", "--licence=no-such-licence"],
            'rejects the card.*"license" must be one of',
        ),
    ],
)
def test_errors_of_the_hub_are_one_line(arguments, words, finished, push, hub, without_timm):
    done = push(finished, *arguments, path=without_timm)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert re.search(words, done.stderr)
    assert {*hub.repositories} == {"ada/taken"}


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("/home/ada/data/pets/", "pets/"),
        ("folder:/data/pets@train,val", "folder:pets@train,val"),
        ("('tfds:imagenet2012', 'folder:~/pets')", "('tfds:imagenet2012', 'folder:pets')"),
        ("gs://bucket/run", "run"),
        ("hf://owner/name", "hf://owner/name"),
        ("ViT-B/16", "ViT-B/16"),
    ],
)
def test_folders_of_this_machine_are_not_published(text, published):
    assert without_folders(text) == published
