"""Exported models are written by the command, and run by JAX alone or by ONNX Runtime."""

import json
import subprocess
import sys

import jax
import numpy as np
import onnxruntime
import pytest
from flax import nnx

import vit_jax
from tests.conftest import HANG, python_path
from tests.system.conftest import ROOT, SMALL
from vit_jax.interop import onnx as interop_onnx
from vit_jax.interop import programs

# Loads a program with no library other than JAX, as a server would.
SERVE = """
import sys, jax, numpy as np
program = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
for images in (np.load(path) for path in sys.argv[2:]):
    np.save(sys.stdout.buffer, np.asarray(program.call(images)))
assert not any(name.startswith(("vit_jax", "flax")) for name in sys.modules)
"""


def export(run, source, file, *flags):
    command = [sys.executable, "-m", "vit_jax.export", str(source), str(file), *flags]
    environment = run.environment | {"PYTHONPATH": python_path(ROOT)}
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=HANG
    )


@pytest.mark.slow
def test_program_gives_the_models_logits_at_two_batch_sizes(run, finished, tmp_path):
    result = export(run, finished, tmp_path / "m.stablehlo")
    assert result.returncode == 0, result.stderr
    model, paths, wanted = vit_jax.load_model(finished, log=str), [], []
    for batch in (2, 5):
        images = np.random.default_rng(batch).uniform(-1, 1, (batch, 16, 16, 3)).astype(np.float32)
        np.save(tmp_path / f"{batch}.npy", images)
        paths.append(tmp_path / f"{batch}.npy")
        wanted.append(np.asarray(model(images)))
    served = subprocess.run(
        [sys.executable, "-c", SERVE, tmp_path / "m.stablehlo", *paths],
        env=run.environment,
        cwd=tmp_path,
        capture_output=True,
    )
    assert served.returncode == 0, served.stderr
    (tmp_path / "out").write_bytes(served.stdout)
    with (tmp_path / "out").open("rb") as file:
        for logits in wanted:
            assert float(np.abs(logits).max()) > 0.01
            np.testing.assert_allclose(np.load(file), logits, atol=1e-5)


def test_onnx_gives_the_models_logits_from_uint8_images(run, finished, tmp_path):
    result = export(run, finished, tmp_path / "m.onnx", "--uint8")
    assert result.returncode == 0, result.stderr
    model = vit_jax.load_model(finished, log=str)
    assert (
        "preprocessing of each image: the short side to 16, the centre 16x16, bilinear\n"
        in result.stdout
    )
    assert "probabilities of the classes: the logits' softmax\n" in result.stdout
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    facts = {
        name: metadata[name] for name in ("input_range", "image_size", "resize_to", "interpolation")
    }
    assert facts == dict(
        input_range="[0, 255]", image_size="[16, 16]", resize_to="16", interpolation="bilinear"
    )
    assert json.loads(metadata["class_names"]) == [str(digit) for digit in range(10)]
    assert metadata["probabilities"] == "softmax"
    for batch in (2, 5):
        images = np.random.default_rng(batch).integers(256, size=(batch, 16, 16, 3), dtype=np.uint8)
        (logits,) = session.run(None, {"images": images})
        np.testing.assert_allclose(logits, model(images.astype(np.float32) / 127.5 - 1), atol=1e-5)


def test_file_that_exists_or_is_of_no_format_or_folder_is_refused(run, finished, tmp_path):
    (tmp_path / "there.stablehlo.json").write_text("mine")
    for name, words in (
        ("there.stablehlo", "there.stablehlo.json exists; give another name"),
        ("m.pb", ".stablehlo or .onnx"),
        ("nowhere/m.onnx", "there is no folder"),
    ):
        result = export(run, finished, tmp_path / name)
        assert result.returncode == 2 and words in result.stderr
    assert (tmp_path / "there.stablehlo.json").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.fixture(scope="module")
def half(run, tmp_path_factory):
    """Returns the workdir of a run in bfloat16, as in configs/finetune.py.

    Options that only affect training are also set.
    """
    workdir = tmp_path_factory.mktemp("half") / "run"
    flags = ("dtype=bfloat16", "scan=True", "remat=full")
    result = run(*SMALL, *(f"--config.model.{flag}" for flag in flags), f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    return workdir


def served(file, images):
    """Returns the logits of an exported model."""
    if file.suffix == ".onnx":
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        return session.run(None, {"images": images})[0]
    return np.asarray(jax.export.deserialize(bytearray(file.read_bytes())).call(images))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype, tolerance",
    [
        ("m.stablehlo", "float32", 1e-5),
        ("m.stablehlo", "bfloat16", 0.1),
        ("m.onnx", "float32", 1e-5),
        ("m.onnx", "float16", 0.02),
    ],
)
def test_model_trained_in_bfloat16_is_written_in_float32_or_as_asked(
    run, half, tmp_path, name, dtype, tolerance
):
    result = export(
        run, half, tmp_path / name, *([] if dtype == "float32" else [f"--dtype={dtype}"])
    )
    assert result.returncode == 0, result.stderr
    assert f"to logits, in {dtype}; differs from the model in float32 by" in result.stdout
    images = np.random.default_rng(0).uniform(-1, 1, (4, 16, 16, 3)).astype(np.float32)
    wanted = np.asarray(vit_jax.load_model(half, log=str, dtype="float32")(images))
    logits = served(tmp_path / name, images)
    scale = float(np.abs(wanted).max())
    assert scale > 0.01
    np.testing.assert_allclose(logits, wanted, atol=tolerance * scale, rtol=0)
    if dtype != "float32":  # The program really computes in another dtype than float32.
        assert np.abs(logits - wanted).max() > 1e-5 * scale


def test_load_model_logs_that_a_model_computes_in_bfloat16(half):
    said = []
    vit_jax.load_model(half, log=said.append)
    vit_jax.load_model(half, log=said.append, dtype="float32")
    assert [line.endswith("computes in bfloat16") for line in said] == [True, True, False]
    assert said[2] == "computes in float32 here"


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_program_normalises_by_the_models_own_mean_and_deviation(run, tmp_path, dtype):
    statistics = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    values = dict(dim=16, depth=1, mlp_dim=32, heads=2, image_size=16, patch_size=4, num_classes=0)
    model = vit_jax.create_model("ViT-Ti/16", **values, **statistics)
    file, arguments = tmp_path / "m.onnx", programs.any_batch((16, 16, 3), np.dtype(dtype))
    written = interop_onnx.convert(
        programs.function_of(model), arguments, ("images", "logits"), 2**30
    )
    file.write_bytes(written.SerializeToString())
    images = np.random.default_rng(0).integers(256, size=(2, 16, 16, 3), dtype=np.uint8)
    normal = (images / 255 - statistics["mean"]) / statistics["std"]
    plain = vit_jax.create_model("ViT-Ti/16", **values)
    pixels = images if dtype == np.uint8 else (images / 127.5 - 1).astype(dtype)
    # Compiled models do not check the range of their float input.
    expected = jax.jit(plain)(normal.astype(np.float32))
    np.testing.assert_allclose(served(file, pixels), expected, atol=1e-4)


def test_onnx_in_bfloat16_is_rejected_with_the_remedy(run, half, tmp_path):
    result = export(run, half, tmp_path / "m.onnx", "--dtype=bfloat16")
    assert result.returncode == 2
    assert "--dtype=float16, or a file called .stablehlo" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, dtype", [("m.stablehlo", "bfloat16"), ("m.onnx", "float16")])
def test_features_are_float32_for_any_computation_dtype(tmp_path, name, dtype):
    values = dict(dim=16, depth=1, mlp_dim=32, heads=2, image_size=16, patch_size=4, num_classes=0)
    model = vit_jax.create_model("ViT-Ti/16", dtype=dtype, **values)
    write = programs.write_onnx if name.endswith("onnx") else programs.write_stablehlo
    run = write(model, tmp_path / name, (16, 16, 3), np.dtype(np.uint8))
    assert np.asarray(run(np.zeros((2, 16, 16, 3), np.uint8))).dtype == np.float32


def test_run_in_bfloat16_is_converted_with_its_parameters_as_they_are(run, half, tmp_path):
    result = run(half, tmp_path / "timm", "--to=timm", "--gelu=erf", module="vit_jax.convert")
    assert result.returncode == 0, result.stderr
    assert "computes in bfloat16" in result.stdout
    models = [vit_jax.load_model(place, log=str, gelu="erf") for place in (half, tmp_path / "timm")]
    old, new = (jax.tree.leaves(nnx.state(model)) for model in models)
    for before, after in zip(old, new, strict=True):
        np.testing.assert_array_equal(before, after)
        assert after.dtype == np.float32
    assert models[1].norm.dtype == np.float32


@pytest.mark.parametrize("write", ["write_stablehlo", "write_onnx"])
def test_models_above_the_size_limit_of_a_file_are_rejected(tmp_path, monkeypatch, write):
    monkeypatch.setattr(programs, "MOST_BYTES", 10_000)
    values = dict(
        dim=16, depth=1, mlp_dim=32, heads=2, image_size=16, patch_size=4, num_classes=1_000
    )
    model = vit_jax.create_model("ViT-Ti/16", **values)
    with pytest.raises(
        vit_jax.UserError, match="its parameters (take|exceed) .* GB.* --dtype=.*float16"
    ):
        getattr(programs, write)(model, tmp_path / "m", (16, 16, 3), np.dtype(np.uint8))
