"""Tests of DALL-E's encoder: tensors are read and written under the names of its published code."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import params_of
from safetensors.numpy import load_file, save_file

import vit_jax
from vit_jax.errors import UserError

WIDTHS, CODES = (8, 8, 16, 24), 9


def random_tensors(rng, blocks=2) -> dict[str, np.ndarray]:
    """Returns a random state dict of the published module, with fewer channels and codes."""
    found = {}

    def conv(name, inputs, outputs, side):
        found[f"{name}.w"] = rng.normal(0, 1, (outputs, inputs, side, side)) / np.sqrt(
            inputs * side**2
        )
        found[f"{name}.b"] = rng.normal(0, 0.3, outputs)

    conv("blocks.input", 3, WIDTHS[0], 7)
    before = WIDTHS[0]
    for group, width in enumerate(WIDTHS, start=1):
        for block in range(1, blocks + 1):
            start = f"blocks.group_{group}.block_{block}"
            if before != width:
                conv(f"{start}.id_path", before, width, 1)
            channels = (before, width // 4, width // 4, width // 4, width)
            for number, side in enumerate((3, 3, 3, 1), start=1):
                conv(
                    f"{start}.res_path.conv_{number}", channels[number - 1], channels[number], side
                )
            before = width
    conv("blocks.output.conv", before, CODES, 1)
    return {name: array.astype(np.float32) for name, array in found.items()}


def scores_of(tensors, image):
    """Returns the scores of codes `[codes, rows, columns]` for an image, in float64.

    The image is `[height, width, 3]` in [0, 1].
    """
    tensors = {name: array.astype(np.float64) for name, array in tensors.items()}

    def conv(name, x):
        kernel = tensors[f"{name}.w"]
        side = kernel.shape[-1]
        padded = np.pad(x, ((0, 0), *[(side // 2, side // 2)] * 2))
        seen = np.lib.stride_tricks.sliding_window_view(padded, (side, side), axis=(1, 2))
        return np.einsum("irckl,oikl->orc", seen, kernel) + tensors[f"{name}.b"][:, None, None]

    x = conv("blocks.input", (0.8 * image + 0.1).transpose(2, 0, 1))
    for group in range(1, 5):
        if group > 1:
            channels, rows, columns = x.shape
            x = x.reshape(channels, rows // 2, 2, columns // 2, 2).max((2, 4))
        for block in (1, 2):
            start, branch = f"blocks.group_{group}.block_{block}", x
            for number in range(1, 5):
                branch = conv(f"{start}.res_path.conv_{number}", np.maximum(branch, 0))
            x = (
                conv(f"{start}.id_path", x) if f"{start}.id_path.w" in tensors else x
            ) + branch / 64
    return conv("blocks.output.conv", np.maximum(x, 0))


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    """Returns random tensors with which no code is the likeliest at all positions."""
    rng = np.random.default_rng(0)
    tensors = random_tensors(rng)
    tensors["blocks.output.conv.b"] -= scores_of(tensors, rng.uniform(size=(24, 24, 3))).mean(
        (1, 2)
    )
    return {name: array.astype(np.float32) for name, array in tensors.items()}


def test_tokens_of_a_file_are_those_of_the_published_code(tensors, tmp_path):
    save_file(tensors, tmp_path / "encoder.safetensors")
    model = vit_jax.load_model(tmp_path / "encoder.safetensors", image_size=(24, 32), log=str)
    images = np.random.default_rng(1).integers(256, size=(2, 24, 32, 3), dtype=np.uint8)
    expected = np.stack([scores_of(tensors, image / 255) for image in images])
    np.testing.assert_allclose(model.code_scores(images), expected.transpose(0, 2, 3, 1), atol=1e-4)
    tokens = expected.argmax(1).reshape(2, -1)
    assert len(np.unique(tokens)) > 2
    np.testing.assert_array_equal(model.codes(images), tokens)


def test_a_state_dict_of_pytorch_is_converted_and_read_back(tensors, torch, tmp_path):
    state = {name: torch.tensor(array) for name, array in tensors.items()}
    torch.save(state, tmp_path / "encoder.pth")
    command = [
        sys.executable,
        "-m",
        "vit_jax.convert",
        tmp_path / "encoder.pth",
        tmp_path / "folder",
    ]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "assumed: pixels in [0, 1] as 0.8 times them and 0.1" in done.stdout
    written = load_file(tmp_path / "folder" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(written[name], array)
    model = vit_jax.load_model(tmp_path / "folder", log=str)
    assert (model.mean, model.std, model.options.widths) == (-0.125, 1.25, WIDTHS)
    assert model.num_classes == CODES


def test_the_error_about_a_pickled_module_states_how_to_extract_its_tensors(tmp_path):
    (tmp_path / "encoder.pkl").write_bytes(b"PK\x03\x04" + bytes(100))
    command = [
        sys.executable,
        "-m",
        "vit_jax.convert",
        tmp_path / "encoder.pkl",
        tmp_path / "folder",
    ]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "weights_only=False).state_dict(), 'FILE.pth') writes its tensors" in done.stderr


@pytest.mark.parametrize("options", [{}, dict(mean=0.5, std=0.25), dict(num_classes=0, channels=1)])
def test_a_model_of_ours_is_written_by_its_names_and_read_back(options, tmp_path):
    arguments = dict(blocks=(1, 2), widths=(8, 12), num_classes=CODES, image_size=16) | options
    model = vit_jax.create_model("DVAE", **arguments)
    vit_jax.save_model(model, tmp_path / "model", log=str)
    assert (
        json.loads((tmp_path / "model" / "config.json").read_text())["architecture"]
        == "dall_e_encoder"
    )
    read = vit_jax.load_model(tmp_path / "model", log=str)
    assert (read.mean, read.std, read.image_size) == (model.mean, model.std, (16, 16))
    ours, theirs = params_of(model), params_of(read)
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        np.testing.assert_array_equal(theirs[path], array)


def test_tensors_that_are_no_encoders_are_refused(tensors, tmp_path):
    save_file({"blocks.input.w": tensors["blocks.input.w"]}, tmp_path / "part.safetensors")
    with pytest.raises(UserError, match="not the tensors of DALL-E's encoder: .*conv_4.w"):
        vit_jax.load_model(tmp_path / "part.safetensors", log=str)
    with pytest.raises(UserError, match="has no DVAE"):
        model = vit_jax.create_model("DVAE", num_classes=3, image_size=8, blocks=(1,), widths=(8,))
        vit_jax.save_model(model, tmp_path / "other", library="timm", log=str)
