"""Authors' `.pth` files: read by PyTorch in a process of its own, as tensors and nothing else."""

import argparse
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from helpers import logits_of, random_images, randomise, torch_logits

import vit_jax
from vit_jax.errors import UserError
from vit_jax.interop.torch_files import unpack


def convert(source, destination):
    command = [sys.executable, "-m", "vit_jax.convert", str(source), str(destination), "--to=timm"]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)


def test_model_of_a_pth_file_gives_the_authors_outputs(torch, timm, tmp_path):
    """DINOv2 with registers as its authors save it: names, masks and positions other than timm's."""
    name, sizes = "vit_small_patch14_reg4_dinov2", dict(embed_dim=128, depth=2, num_heads=2, img_size=56)
    theirs = randomise(torch, timm.create_model(name, **sizes))
    saved = dict(theirs.state_dict())
    saved["register_tokens"] = saved.pop("reg_token")
    first = torch.full((1, 1, 128), 0.3)  # The class token's own position, which timm adds to the token.
    saved["pos_embed"] = torch.cat([first, saved["pos_embed"]], dim=1)
    saved["cls_token"] = saved["cls_token"] - first
    saved["mask_token"] = torch.ones(1, 128)
    torch.save(saved, tmp_path / "dinov2.pth")
    done = convert(tmp_path / "dinov2.pth", tmp_path / "folder")
    assert done.returncode == 0, done.stderr
    assert "left out, of pre-training alone: mask_token" in done.stdout
    assert "assumed: pixels by ImageNet's mean and deviation" in done.stdout
    ours = vit_jax.load_model(tmp_path / "folder", say=str)
    assert ours.mean == (0.485, 0.456, 0.406)
    images = random_images(ours)
    wanted = torch_logits(torch, theirs.double(), np.float64(ours.normalize(images)))
    np.testing.assert_allclose(logits_of(ours, images), wanted, atol=2e-6 * np.abs(wanted).max())


@pytest.fixture
def teacher_and_student(torch, timm, tmp_path):
    """A checkpoint of DINO's training: two networks with their projection heads, and a number."""
    models = {}
    for number, name in enumerate(("teacher", "student")):
        torch.manual_seed(number)
        sizes = dict(img_size=32, embed_dim=64, depth=1, num_heads=1, num_classes=0)
        model = timm.create_model("vit_tiny_patch16_224", **sizes)
        start = "module.backbone." if name == "student" else "backbone."
        models[name] = {start + key: value for key, value in model.state_dict().items()}
        models[name]["head.mlp.0.weight"] = torch.ones(2, 64)
    torch.save(models | {"epoch": 3}, tmp_path / "training.pth")
    return tmp_path / "training.pth", models


def test_one_of_several_networks_is_named_by_its_key(teacher_and_student, tmp_path):
    file, models = teacher_and_student
    with pytest.raises(UserError, match="asked for by their key, FILE@KEY; there are: teacher, student"):
        unpack(str(file), tmp_path)
    for name, start in (("teacher", "backbone."), ("student", "module.backbone.")):
        folder = tmp_path / name
        folder.mkdir()
        _, notes = unpack(f"{file}@{name}", folder)
        assert notes[1] == "left out, of pre-training alone: head"
        cls = np.asarray(vit_jax.load_model(folder, say=str).cls[...])
        np.testing.assert_array_equal(cls, models[name][start + "cls_token"].numpy())


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return os.mkdir, (self.file,)


def test_nothing_but_tensors_is_unpickled(torch, tmp_path):
    torch.save({"model": {"x": torch.ones(1)}, "trap": Trap(tmp_path / "sprung")}, tmp_path / "trap.pth")
    inside = argparse.Namespace(lr=1, trap=Trap(tmp_path / "sprung"))
    torch.save({"model": {"x": torch.ones(1)}, "args": inside}, tmp_path / "args.pth")
    torch.save({"model": {"x": torch.ones(1)}, "seed": Fraction(1, 2)}, tmp_path / "object.pth")
    named = {"trap": r"posix.mkdir", "args": r"posix.mkdir", "object": "fractions.Fraction"}
    for name, what in named.items():
        with pytest.raises(UserError, match=rf"{name}.pth: it holds more than tensors \({what}\)"):
            unpack(str(tmp_path / f"{name}.pth"), tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_what_cannot_be_read_is_one_line(torch, tmp_path):
    (tmp_path / "damaged.pth").write_bytes(b"PK\x03\x04" + bytes(100))
    torch.save([1, 2], tmp_path / "list.pth")
    cases = {
        "damaged.pth": "torch cannot read it",
        "list.pth": "there are: none",
        "no.pth": "there is no file",
    }
    for name, words in cases.items():
        done = convert(tmp_path / name, tmp_path / "folder")
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert not (tmp_path / "folder").exists()


def test_other_commands_go_on_to_refuse_it(torch, tmp_path):
    torch.save({"x": torch.ones(1)}, tmp_path / "model.pth")
    with pytest.raises(UserError, match="pickle"):
        vit_jax.load_model(tmp_path / "model.pth", say=str)
