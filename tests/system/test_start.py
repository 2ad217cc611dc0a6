"""Programs start without imports and compilations that they do not need."""

import importlib.util
import os
import subprocess
import sys

import pytest
from PIL import Image

import vit_jax
from tests.data.prepared import prepare
from tests.system.conftest import SMALL

CREATE = """
import sys
import jax
import vit_jax

compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
vit_jax.create_model("ViT-Ti/16")
print(compiled.count("/jax/core/compile/backend_compile_duration"))
jax.jit(lambda x: x + 1)(1.0)
print(compiled.count("/jax/core/compile/backend_compile_duration"))
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_a_model_is_created_without_compilations_and_imports_for_training():
    process = subprocess.run(
        [sys.executable, "-c", CREATE],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    compiled, counted, imported = process.stdout.splitlines()
    assert int(compiled) == 0 < int(counted)
    others = {
        "clu",
        "grain",
        "ml_collections",
        "orbax",
        "tensorflow",
        "tensorflow_datasets",
        "tensorstore",
    }
    assert not others & set(imported.split())


def test_a_run_starts_without_libraries_that_it_may_not_need():
    others = {"matplotlib", "scipy.linalg", "scipy.ndimage", "huggingface_hub"}
    code = f"import sys, vit_jax.runs.loop; print(sorted({others} & set(sys.modules)))"
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert process.stdout == "[]\n", process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("part", ["tfds:{}", "array_record:{}/*-train.array_record*"])
def test_training_from_array_record_and_tfds_imports_no_tensorflow(
    run, tmp_path, no_tensorflow, part
):
    prepare("cifar10", tmp_path / "data", {"train": 64, "test": 8})
    (folder,) = (tmp_path / "data" / "cifar10").iterdir()
    parts = (part.format(folder),)
    result = run(
        *SMALL,
        f"--workdir={tmp_path / 'run'}",
        "--config.steps=8",
        "--config.data.source=mixture",
        f"--config.data.parts={parts}",
        "--config.data.num_classes=10",
        "--config.data.workers=1",
        PYTHONPATH=no_tensorflow.python_path,
    )
    no_tensorflow.check()
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs pip install -e ".[plan]"'
)
def test_a_command_prints_only_its_own_lines_if_libtpu_is_installed(run, finished, tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    environment = run.environment | {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"
    }  # With its lock, libtpu would not be loaded and print nothing.
    del environment["JAX_PLATFORMS"]
    process = subprocess.run(
        [sys.executable, "-m", "vit_jax.predict", f"--checkpoint={finished}", tmp_path / "a.png"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    said = []
    vit_jax.load_model(finished, log=said.append)
    *described, crop = process.stderr.splitlines()
    assert described == said and crop.startswith("of each image: ")
