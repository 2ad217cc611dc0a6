"""The command `vit_jax.convert` converts a run to other libraries' checkpoints and back."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import vit_jax
from vit_jax.checkpoint_crop import checkpoint_crop
from vit_jax.data.sources.digits import digits
from vit_jax.interop.open import open_checkpoint
from vit_jax.load import build_model

pytestmark = pytest.mark.slow  # Each test starts processes, or compiles for seconds.


@pytest.fixture(scope="session")
def convert(run):
    return lambda *arguments: run(*arguments, module="vit_jax.convert")


def parameters(source) -> list[np.ndarray]:
    return jax.tree.leaves(
        nnx.to_pure_dict(nnx.state(vit_jax.load_model(source, log=str), nnx.Param))
    )


def test_a_run_goes_to_every_library_and_comes_back(finished, convert, tmp_path):
    there = {
        "google": tmp_path / "model.npz",
        "transformers": tmp_path / "transformers",
        "timm": tmp_path / "timm",
    }
    source = finished
    for library, destination in there.items():
        done = convert(
            source,
            destination,
            *(["--to=timm", "--probabilities=sigmoid"] if library == "timm" else []),
        )
        assert done.returncode == 0, done.stderr
        assert "read back, it is the same bit for bit" in done.stdout.splitlines()[-1]
        source = destination  # Each checkpoint is converted from the previous one.
    assert vit_jax.load_model(source, log=str).about.probabilities == "sigmoid"
    for ours, theirs in zip(parameters(finished), parameters(source), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_mapped_resized_new_and_removed_parameters_are_printed(finished, convert, tmp_path):
    done = convert(finished, tmp_path / "out", "--image_size=24x32", "--num_classes=3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "of a run" in lines[0] and "16x16 pixels, 10 classes" in lines[0]
    assert any("blocks/*/attention/qkv/kernel -> vit.encoder.layer.*" in line for line in lines)
    assert "resized: position_embedding/table 4x4 -> 6x8" in lines
    assert any(line.startswith("new: head/bias [10] -> [3], zero") for line in lines)


def test_transformers_own_pipeline_answers_with_the_runs_class_names(
    finished, convert, transformers, tmp_path
):
    manifest = tmp_path / "run" / "manifest.json"
    shutil.copytree(finished, tmp_path / "run")
    said = json.loads(manifest.read_text())
    names = [f"digit {name}" for name in said["class_names"]]
    manifest.write_text(json.dumps(said | dict(class_names=names)))
    done = convert(tmp_path / "run", tmp_path / "folder", "--to=transformers")
    assert done.returncode == 0, done.stderr
    image = digits("test")[3].image
    image = Image.fromarray(
        image.repeat(2, axis=0).repeat(2, axis=1)
    )  # The pipeline averages the doubled pixels, so it restores the image.
    answer = transformers.pipeline("image-classification", str(tmp_path / "folder"), top_k=10)(
        image
    )
    assert sorted(one["label"] for one in answer) == sorted(names)
    checkpoint = open_checkpoint(tmp_path / "run")
    crop = dataclasses.replace(checkpoint_crop(checkpoint, 16), interpolation="bilinear_antialias")
    model = build_model(checkpoint, log=str)
    chances = np.asarray(jax.nn.softmax(model(crop(np.asarray(image))[None])))[0]
    wanted = dict(zip(names, chances, strict=True))
    for one in answer:
        assert one["score"] == pytest.approx(wanted[one["label"]], abs=1e-3)
    assert answer[0]["label"] == names[chances.argmax()]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_class_names_go_to_other_libraries_and_come_back(library, finished, convert, tmp_path):
    done = convert(finished, tmp_path / "folder", f"--to={library}")
    assert done.returncode == 0, done.stderr
    assert "note: not written: interpolation 'bilinear': bilinear there, antialiased" in done.stdout
    assert open_checkpoint(tmp_path / "folder").class_names == tuple("0123456789")
    done = convert(tmp_path / "folder", tmp_path / "fewer", f"--to={library}", "--num_classes=3")
    assert open_checkpoint(tmp_path / "fewer").class_names in (
        (),
        ("LABEL_0", "LABEL_1", "LABEL_2"),
    )


@pytest.mark.one_variant
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
        (
            ("{run}", "{tmp}/out", "--tower=both", "--probabilities=sigmoid"),
            "--probabilities does not apply with --tower=both",
        ),
        (
            ("{run}", "{tmp}/out", "--image_size=15"),
            "patch size 4 does not divide the image of 15x15",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, finished, convert, tmp_path):
    done = convert(*(part.format(run=finished, tmp=tmp_path) for part in arguments))
    assert done.returncode == 2
    assert (
        message in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    )
    assert list(tmp_path.iterdir()) == []
