"""`python -m vit_jax.convert`, as a user starts it, from a run to other libraries and back."""

import jax
import numpy as np
import pytest
from flax import nnx

import vit_jax


@pytest.fixture(scope="session")
def convert(run):
    return lambda *arguments: run(*arguments, module="vit_jax.convert")


def parameters(source) -> list[np.ndarray]:
    return jax.tree.leaves(nnx.to_pure_dict(nnx.state(vit_jax.load_model(source, say=str), nnx.Param)))


def test_a_run_goes_to_every_library_and_comes_back(finished, convert, tmp_path):
    there = {
        "google": tmp_path / "model.npz",
        "transformers": tmp_path / "transformers",
        "timm": tmp_path / "timm",
    }
    source = finished
    for library, destination in there.items():
        done = convert(source, destination, *(["--to=timm"] if library == "timm" else []))
        assert done.returncode == 0, done.stderr
        assert "read back, it is the same bit for bit" in done.stdout.splitlines()[-1]
        source = destination  # Each from the one before.
    for ours, theirs in zip(parameters(finished), parameters(source), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_what_mapped_was_resized_new_and_dropped_is_printed(finished, convert, tmp_path):
    done = convert(finished, tmp_path / "out", "--image_size=24x32", "--num_classes=3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "of a run" in lines[0] and "16x16 pixels, 10 classes" in lines[0]
    assert any("blocks/*/attention/qkv/kernel: - -> vit.encoder.layer.*" in line for line in lines)
    assert "resized: position_embedding/table 4x4 -> 6x8" in lines
    assert any(line.startswith("new: head/bias [10] -> [3], zero") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "usage: python -m vit_jax.convert SOURCE DESTINATION"),
        (("{run}", "{tmp}/model.pth"), "give FILE.npz for Google's format, or a new folder"),
        (("{run}", "{tmp}/nowhere/out"), "there is no folder"),
        (("{run}", "{tmp}"), "exists already"),
        (("{tmp}/none", "{tmp}/out"), "there is no"),
        (("{run}", "{tmp}/out", "--image_size=big"), "--image_size=big is neither"),
        (("{run}", "{tmp}/out", "--to=keras"), "keras"),
        (("{run}", "{tmp}/out", "--image_size=15"), "patch size 4 does not divide the image of 15x15"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, finished, convert, tmp_path):
    done = convert(*(part.format(run=finished, tmp=tmp_path) for part in arguments))
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
