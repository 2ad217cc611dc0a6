"""A model as a file: written by the command, run by JAX alone or by ONNX Runtime."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

import vit_jax
from tests.system.conftest import ROOT

needs_onnx = pytest.mark.skipif(
    importlib.util.find_spec("jax2onnx") is None, reason='needs pip install -e ".[onnx]"'
)

# With no other library than JAX: what a server has.
SERVE = """
import sys, jax, numpy as np
program = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
for images in (np.load(path) for path in sys.argv[2:]):
    np.save(sys.stdout.buffer, np.asarray(program.call(images)))
assert not any(name.startswith(("vit_jax", "flax")) for name in sys.modules)
"""


def export(run, source, file, *flags):
    command = [sys.executable, "-m", "vit_jax.export", str(source), str(file), *flags]
    environment = run.environment | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_program_gives_the_models_logits_at_two_batch_sizes(run, finished, tmp_path):
    result = export(run, finished, tmp_path / "m.stablehlo")
    assert result.returncode == 0, result.stderr
    model, paths, wanted = vit_jax.load_model(finished, say=str), [], []
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


@needs_onnx
def test_onnx_gives_the_models_logits_from_uint8_images(run, finished, tmp_path):
    import onnxruntime

    result = export(run, finished, tmp_path / "m.onnx", "--uint8")
    assert result.returncode == 0, result.stderr
    model = vit_jax.load_model(finished, say=str)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    for batch in (2, 5):
        images = np.random.default_rng(batch).integers(256, size=(batch, 16, 16, 3), dtype=np.uint8)
        (logits,) = session.run(None, {"images": images})
        np.testing.assert_allclose(logits, model(images.astype(np.float32) / 127.5 - 1), atol=1e-5)


def test_file_that_exists_or_is_of_no_format_or_folder_is_refused(run, finished, tmp_path):
    (tmp_path / "there.stablehlo").write_text("mine")
    for name, words in (
        ("there.stablehlo", "exists; give another name"),
        ("m.pb", ".stablehlo or .onnx"),
        ("nowhere/m.onnx", "there is no folder"),
    ):
        result = export(run, finished, tmp_path / name)
        assert result.returncode == 2 and words in result.stderr
    assert (tmp_path / "there.stablehlo").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1
