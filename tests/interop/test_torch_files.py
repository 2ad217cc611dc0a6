"""The authors' `.pth` files are read by PyTorch in a separate process, as tensors only."""

import argparse
import json
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from helpers import logits_of, random_images, randomise, torch_logits
from safetensors.numpy import load_file

import vit_jax
from vit_jax.errors import UserError
from vit_jax.interop.timm.authors import PIXELS
from vit_jax.interop.torch_files import unpack


def convert(source, destination, *options):
    command = [
        sys.executable,
        "-m",
        "vit_jax.convert",
        str(source),
        str(destination),
        "--to=timm",
        *options,
    ]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)


def test_model_of_a_pth_file_has_the_authors_outputs(torch, timm, tmp_path):
    """Reads a DINOv2 with registers as its authors save it.

    Its names, mask token and position table differ from timm's.
    """
    name, sizes = (
        "vit_small_patch14_reg4_dinov2",
        dict(embed_dim=128, depth=2, num_heads=2, img_size=56),
    )
    theirs = randomise(torch, timm.create_model(name, **sizes))
    saved = dict(theirs.state_dict())
    saved["register_tokens"] = saved.pop("reg_token")
    first = torch.full(
        (1, 1, 128), 0.3
    )  # The class token's own position embedding; timm includes it in the token.
    saved["pos_embed"] = torch.cat([first, saved["pos_embed"]], dim=1)
    saved["cls_token"] = saved["cls_token"] - first
    saved["mask_token"] = torch.ones(1, 128)
    torch.save(saved, tmp_path / "dinov2.pth")
    done = convert(tmp_path / "dinov2.pth", tmp_path / "folder")
    assert done.returncode == 0, done.stderr
    assert "skipped, used in pre-training only: mask_token" in done.stdout
    assert "assumed: pixels by the mean and std `imagenet`, a crop of 7/8" in done.stdout
    ours = vit_jax.load_model(tmp_path / "folder", log=str)
    assert ours.mean == (0.485, 0.456, 0.406)
    images = random_images(ours)
    wanted = torch_logits(torch, theirs.double(), np.float64(ours.normalize(images)))
    np.testing.assert_allclose(logits_of(ours, images), wanted, atol=2e-6 * np.abs(wanted).max())


def test_register_tokens_of_another_shape_are_one_line(torch, timm, tmp_path):
    saved = dict(timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=48).state_dict())
    saved["register_tokens"] = torch.ones(48)
    torch.save(saved, tmp_path / "flat.pth")
    done = convert(tmp_path / "flat.pth", tmp_path / "folder")
    assert done.returncode == 2
    assert "register tokens of the shape [48]; expected [1, registers, dim]" in done.stderr
    assert "Traceback" not in done.stderr


def authors_of_dinov3(torch, state, grid):
    """Returns tensors under the names of DINOv3's authors, who mask the bias of keys.

    The values of this bias have no effect.
    """
    saved = {"mask_token": torch.ones(1, 128), "local_cls_norm.weight": torch.ones(128)}
    saved["rope_embed.periods"] = 100 ** (torch.arange(16) / 16)
    for name, x in state.items():
        name = re.sub(r"gamma_(\d)", r"ls\1.gamma", name).replace("reg_token", "storage_tokens")
        if name.endswith("q_bias"):
            start = name.removesuffix("q_bias")
            keys = torch.full_like(x, float("nan"))
            saved[start + "qkv.bias"] = torch.cat([x, keys, state[start + "v_bias"]])
            saved[start + "qkv.bias_mask"] = torch.cat([x * 0 + 1, x * 0, x * 0 + 1])
        elif not name.endswith("v_bias"):
            saved[name] = x
    return saved


def authors_of_eva02(torch, state, grid):
    """Returns tensors under the names of EVA-02's authors.

    They include parameters that only pre-training uses, and tables of rotation angles.
    """
    saved = {"mask_token": torch.ones(1, 1, 128), "lm_head.weight": torch.ones(2, 128)}
    places = torch.arange(grid) / grid * 16
    turns = torch.outer(places, 10_000 ** (-torch.arange(0, 32, 2) / 32)).repeat_interleave(
        2, dim=1
    )
    both = (turns[:, None].expand(-1, grid, -1), turns[None].expand(grid, -1, -1))
    angles = torch.cat(both, dim=-1)
    if (
        "blocks.0.attn.q_proj.weight" in state
    ):  # Files of fine-tuned models have the positions on one axis.
        angles = angles.reshape(-1, 64)
    for start in ("", "blocks.0.attn."):
        saved |= {f"{start}rope.freqs_cos": angles.cos(), f"{start}rope.freqs_sin": angles.sin()}
    for name, x in state.items():
        name = re.sub(r"([qv])_proj.bias", r"\1_bias", name)
        if "mlp.fc1." in name:  # In the small models, fc1 packs the gate (first) and the values.
            for way, half in zip(("w1", "w2"), x.chunk(2), strict=True):
                saved[name.replace("fc1", way)] = half
        else:
            for theirs, timms in dict(w1="fc1_g", w2="fc1_x", w3="fc2", ffn_ln="norm").items():
                name = name.replace(f"mlp.{timms}.", f"mlp.{theirs}.")
            saved[name] = x
    return saved


def authors_of_beit(torch, state, grid):
    saved = dict(state, mask_token=torch.ones(1, 1, 128))
    saved["blocks.0.attn.relative_position_index"] = torch.zeros(5, 5, dtype=torch.int64)
    return saved | {"cls_pt_layers.0.norm1.weight": torch.ones(128), "lm_head.bias": torch.ones(2)}


def authors_of_deit3(torch, state, grid):
    return {re.sub(r"ls(\d).gamma", r"gamma_\1", name): x for name, x in state.items()}


def as_they_are(torch, state, grid):
    return state


def authors_of_convnext(torch, state, grid):
    saved = {}
    for name, x in state.items():
        name = re.sub(r"^stem\.", "downsample_layers.0.", name).replace(".blocks.", ".")
        name = re.sub(r"^stages\.(\d)\.downsample\.", r"downsample_layers.\1.", name)
        name = (
            name.replace("conv_dw", "dwconv")
            .replace("mlp.fc", "pwconv")
            .replace("head.norm", "norm")
        )
        if "mlp.grn" in name:
            name = name.replace("mlp.grn.weight", "grn.gamma").replace("mlp.grn.bias", "grn.beta")
            x = x[None, None, None]
        saved[name.replace("head.fc", "head")] = x
    return saved


def authors_of_dinov3s_convnext(torch, state, grid):
    saved = authors_of_convnext(torch, state, grid)
    return saved | {f"norms.3.{part}": saved[f"norm.{part}"] for part in ("weight", "bias")}


def authors_of_fcmae(torch, state, grid):
    """Returns tensors of sparse layers below `encoder`, and of a decoder; there is no last norm."""
    saved = {"mask_token": torch.zeros(1, 8, 1, 1), "decoder.0.norm.weight": torch.ones(8)}
    saved |= {"proj.bias": torch.ones(8), "pred.bias": torch.ones(3072)}
    for name, x in authors_of_convnext(torch, state, grid).items():
        name = re.sub(r"(pwconv\d)\.", r"\1.linear.", name)
        name = re.sub(r"(\.norm|downsample_layers\.[123]\.0)\.", r"\1.ln.", name)
        if re.search(r"(dwconv|downsample_layers\.[123]\.1)\.", name):
            name = name.replace(".weight", ".kernel")
            # Sparse kernels have the axes column and row, inputs (except depthwise ones), and
            # outputs.
            if x.ndim == 4:
                x = x.permute(3, 2, 1, 0).flatten(0, 1)
                x = x[:, 0] if "dwconv" in name else x
            else:
                x = x[None]
        elif "grn" in name:
            x = x[0, 0]
        if not name.startswith(("norm.", "head.")):
            saved[f"encoder.{name}"] = x
    return saved


def authors_of_swin(torch, state, grid):
    """Returns tensors with index tables, and with patch merging at the end of a stage."""
    saved = {
        "layers.0.blocks.0.attn.relative_position_index": torch.zeros(16, 16, dtype=torch.int64)
    }
    for name, x in state.items():
        name = re.sub(
            r"^layers\.(\d)\.down", lambda found: f"layers.{int(found[1]) - 1}.down", name
        )
        saved[name.replace("head.fc", "head")] = x
    return saved


SMALL = dict(embed_dim=128, depth=2, num_heads=2, img_size=64)
AUTHORS = [
    (
        "vit_base_patch16_dinov3_qkvb",
        dict(global_pool="token"),
        authors_of_dinov3,
        None,
        "imagenet",
    ),
    (
        "vit_base_patch16_dinov3",
        dict(global_pool="token"),
        authors_of_dinov3,
        "satellite",
        "satellite",
    ),
    ("eva02_base_patch14_448", dict(img_size=56), authors_of_eva02, None, "clip"),
    (
        "eva02_small_patch14_224",
        dict(img_size=56, use_fc_norm=False),
        authors_of_eva02,
        None,
        "clip",
    ),
    (
        "eva_giant_patch14_224",
        dict(embed_dim=1408, depth=1, num_heads=16, img_size=28),
        as_they_are,
        "clip",
        "clip",
    ),
    ("beit_base_patch16_224", {}, authors_of_beit, "half", "half"),
    ("deit3_small_patch16_224", {}, authors_of_deit3, None, "imagenet"),
]


@pytest.mark.parametrize(
    ("name", "sizes", "rename", "pixels", "seen"), AUTHORS, ids=[case[0] for case in AUTHORS]
)
def test_authors_files_of_later_vits_have_timms_outputs(
    name, sizes, rename, pixels, seen, torch, timm, tmp_path
):
    sizes = SMALL | sizes
    theirs = randomise(torch, timm.create_model(name, **sizes))
    size = sizes["img_size"]
    saved = rename(torch, dict(theirs.state_dict()), size // theirs.patch_embed.patch_size[0])
    torch.save({"model": saved}, tmp_path / "x.pth")
    done = convert(
        tmp_path / "x.pth", tmp_path / "folder", *([f"--pixels={pixels}"] if pixels else [])
    )
    assert done.returncode == 0, done.stderr
    assert f"assumed: pixels by the mean and std `{seen}`, a crop of 7/8" in done.stdout
    ours = vit_jax.load_model(tmp_path / "folder", image_size=size, log=str)
    assert np.allclose(ours.mean, PIXELS[seen]["mean"])
    images = random_images(ours)
    wanted = torch_logits(torch, theirs.double(), np.float64(ours.normalize(images)))
    np.testing.assert_allclose(logits_of(ours, images), wanted, atol=4e-6 * np.abs(wanted).max())


STAGES = dict(depths=(1, 1, 2, 1), dims=(16, 24, 32, 64))
CONVNEXTS = [
    ("dinov3", "convnext_tiny", dict(num_classes=0), authors_of_dinov3s_convnext),
    ("convnext", "convnext_tiny", dict(num_classes=7), authors_of_convnext),
    ("convnextv2", "convnextv2_tiny", dict(num_classes=7), authors_of_convnext),
    ("fcmae", "convnextv2_tiny", dict(num_classes=0), authors_of_fcmae),
]


@pytest.mark.parametrize(
    ("name", "sizes", "rename"),
    [case[1:] for case in CONVNEXTS],
    ids=[case[0] for case in CONVNEXTS],
)
def test_authors_files_of_convnexts_have_timms_outputs(name, sizes, rename, torch, timm, tmp_path):
    theirs = randomise(torch, timm.create_model(name, **STAGES | sizes))
    if new := rename is authors_of_fcmae:
        theirs.head.norm.reset_parameters()
    torch.save({"model": rename(torch, dict(theirs.state_dict()), 0)}, tmp_path / "x.pth")
    folder = tmp_path / "folder"
    folder.mkdir()
    _, notes = unpack(str(tmp_path / "x.pth"), folder)
    assert ("new: the last norm, ones and zeros, which this pre-training lacks" in notes) == new
    left = [note.split(": ")[1] for note in notes if note.startswith("skipped")]
    assert left == (["decoder", "mask_token", "pred", "proj"] if new else [])
    ours = vit_jax.load_model(folder, image_size=64, log=str)
    assert np.allclose(ours.mean, PIXELS["imagenet"]["mean"])
    images = random_images(ours)
    wanted = torch_logits(torch, theirs.double(), np.float64(ours.normalize(images)))
    np.testing.assert_allclose(logits_of(ours, images), wanted, atol=4e-6 * np.abs(wanted).max())


WINDOWS = dict(embed_dim=32, depths=(2, 2), num_heads=(2, 4))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("swin_tiny_patch4_window7_224", dict(img_size=64, window_size=4, num_classes=7)),
        ("swin_tiny_patch4_window7_224", dict(img_size=96, window_size=4, num_classes=0)),
        ("swinv2_tiny_window8_256", dict(img_size=64, window_size=4, num_classes=7)),
        (
            "swinv2_tiny_window8_256",
            dict(img_size=96, window_size=12, pretrained_window_sizes=(6, 3), num_classes=7),
        ),
    ],
)
def test_authors_files_of_swins_have_timms_outputs(name, sizes, torch, timm, tmp_path):
    """The sizes of images and of windows, also in pre-training, are derived from the tensors."""
    theirs = randomise(torch, timm.create_model(name, **WINDOWS | sizes))
    saved = authors_of_swin(torch, dict(theirs.state_dict()), 0)
    for stage, layer in enumerate(theirs.layers):
        for number, block in enumerate(layer.blocks):
            found = dict(attn_mask=block.attn_mask)
            if name.startswith("swinv2"):
                found["attn.relative_coords_table"] = block.attn.relative_coords_table
            held = {name: x.clone() for name, x in found.items() if x is not None}
            saved |= {f"layers.{stage}.blocks.{number}.{name}": x for name, x in held.items()}
    torch.save({"model": saved}, tmp_path / "x.pth")
    folder = tmp_path / "folder"
    folder.mkdir()
    unpack(str(tmp_path / "x.pth"), folder)
    ours = vit_jax.load_model(folder, log=str)
    assert ours.image_size == (sizes["img_size"],) * 2
    images = random_images(ours)
    wanted = torch_logits(torch, theirs.double(), np.float64(ours.normalize(images)))
    np.testing.assert_allclose(logits_of(ours, images), wanted, atol=5e-6 * np.abs(wanted).max())


def test_a_swin_for_large_images_squeezes_whole_images(torch, timm, tmp_path):
    """The windows have a side of 12 positions, and no tensor determines the image size."""
    sizes = WINDOWS | dict(img_size=384, window_size=12)
    state = timm.create_model("swin_base_patch4_window12_384", **sizes).state_dict()
    torch.save(authors_of_swin(torch, dict(state), 0), tmp_path / "x.pth")
    _, notes = unpack(str(tmp_path / "x.pth"), tmp_path)
    assert notes[-1].endswith("`imagenet`, all of the image, squeezed, bicubic")
    assert (
        json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]["crop_mode"]
        == "squash"
    )


@pytest.mark.parametrize("table", [None, "zeros"])
def test_a_swin_v2_whose_windows_cannot_be_derived_is_refused(table, torch, timm, tmp_path):
    model = timm.create_model(
        "swinv2_tiny_window8_256", **WINDOWS | dict(img_size=64, window_size=4)
    )
    saved = authors_of_swin(torch, dict(model.state_dict()), 0)
    words = "unknown window sizes: a Swin V2 without its relative_coords_table"
    if table:
        saved["layers.0.blocks.0.attn.relative_coords_table"] = torch.zeros(1, 7, 7, 2)
        words = r"its positions \(relative_coords_table\) are not those of the published models"
    torch.save(saved, tmp_path / "x.pth")
    with pytest.raises(UserError, match=words):
        unpack(str(tmp_path / "x.pth"), tmp_path)


@pytest.mark.parametrize(("size", "crop"), [(224, 0.875), (384, 1.0)])
@pytest.mark.parametrize(
    ("name", "pixels"), [("deit3_small_patch16_224", None), ("beit_base_patch16_224", "half")]
)
def test_models_for_large_images_use_the_whole_image(
    name, pixels, size, crop, torch, timm, tmp_path
):
    state = timm.create_model(name, **SMALL | dict(img_size=size, depth=1)).state_dict()
    rename = authors_of_deit3 if name.startswith("deit3") else authors_of_beit
    torch.save(rename(torch, dict(state), size // 16), tmp_path / "x.pth")
    unpack(str(tmp_path / "x.pth"), tmp_path, pixels)
    assert json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]["crop_pct"] == crop


def test_errors_about_undetermined_values_state_what_to_give(torch, timm, tmp_path):
    def refused(name, sizes, rename, **changes):
        state = timm.create_model(name, **SMALL | sizes).state_dict()
        torch.save(rename(torch, dict(state), 4) | changes, tmp_path / "x.pth")
        with pytest.raises(UserError) as error:
            unpack(str(tmp_path / "x.pth"), tmp_path)
        return str(error.value)

    words = refused("beit_base_patch16_224", {}, authors_of_beit)
    assert words.endswith(
        "contain no mean and std of pixels; give one of --pixels=half (BEiT), "
        "--pixels=imagenet (BEiT v2)"
    )
    other = {"rope_embed.periods": torch.arange(16.0)}
    words = refused(
        "vit_base_patch16_dinov3_qkvb", dict(global_pool="token"), authors_of_dinov3, **other
    )
    assert words.endswith("its positions (periods) are not those of the published models")
    words = refused("eva_giant_patch14_224", dict(img_size=56), as_they_are)
    assert words.endswith("unknown number of heads: an EVA of width 128 without rotary positions")


@pytest.fixture
def teacher_and_student(torch, timm, tmp_path):
    """Writes a checkpoint of DINO's training: two networks with heads, and the epoch's number."""
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


def test_one_of_several_networks_is_selected_by_its_key(teacher_and_student, tmp_path):
    file, models = teacher_and_student
    with pytest.raises(
        UserError, match="asked for by their key, FILE@KEY; there are: teacher, student"
    ):
        unpack(str(file), tmp_path)
    for name, start in (("teacher", "backbone."), ("student", "module.backbone.")):
        folder = tmp_path / name
        folder.mkdir()
        _, notes = unpack(f"{file}@{name}", folder)
        assert notes[1] == "skipped, used in pre-training only: head"
        cls = np.asarray(vit_jax.load_model(folder, log=str).cls[...])
        np.testing.assert_array_equal(cls, models[name][start + "cls_token"].numpy())


WRAPPED = {  # File name, the key to select, and a function from a state dict to the file's content.
    "lightning": (
        "epoch=3.ckpt",
        "",
        lambda x: {"state_dict": {f"model.{k}": v for k, v in x.items()}},
    ),
    "timm's trainer": (
        "model_best.pth.tar",
        "@state_dict_ema",
        lambda x: {"state_dict": {k: v + 1 for k, v in x.items()}, "state_dict_ema": x, "epoch": 3},
    ),
    "net, float64": ("net.pt", "", lambda x: {f"net.{k}": v.double() for k, v in x.items()}),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_files_of_trainers_are_read(case, torch, timm, tmp_path):
    name, key, wrap = WRAPPED[case]
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, num_classes=3, embed_dim=64, depth=1, num_heads=1
    )
    torch.save(wrap(model.state_dict()), tmp_path / name)
    folder, notes = unpack(f"{tmp_path / name}{key}", tmp_path)
    assert ("rounded from float64 to float32" in notes[0]) == (case == "net, float64")
    ours = vit_jax.load_model(folder, log=str)
    images = random_images(ours)
    wanted = torch_logits(torch, model.double(), np.float64(ours.normalize(images)))
    np.testing.assert_allclose(logits_of(ours, images), wanted, atol=2e-6)


def test_pytorch_model_bin_is_read_with_the_files_next_to_it(torch, transformers, tmp_path):
    config = transformers.ViTConfig(
        image_size=32,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    theirs = transformers.ViTForImageClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    torch.save(
        {name: torch.from_numpy(x) for name, x in saved.items()}, tmp_path / "pytorch_model.bin"
    )
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "ViTImageProcessor"}'
    )
    (tmp_path / "folder").mkdir()
    ours = vit_jax.load_model(
        unpack(str(tmp_path / "pytorch_model.bin"), tmp_path / "folder")[0], log=str
    )
    images = random_images(ours)
    seen = torch.from_numpy(np.array(ours.normalize(images)).transpose(0, 3, 1, 2).copy())
    np.testing.assert_allclose(logits_of(ours, images), theirs(seen).logits.detach(), atol=2e-6)
    assert ours.about.preprocessing.kind == "square"


class Trap:
    """An object whose unpickling creates a folder."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return os.mkdir, (self.file,)


def test_only_tensors_are_unpickled(torch, tmp_path):
    torch.save(
        {"model": {"x": torch.ones(1)}, "trap": Trap(tmp_path / "sprung")}, tmp_path / "trap.pth"
    )
    inside = argparse.Namespace(lr=1, trap=Trap(tmp_path / "sprung"))
    torch.save({"model": {"x": torch.ones(1)}, "args": inside}, tmp_path / "args.pth")
    torch.save({"model": {"x": torch.ones(1)}, "seed": Fraction(1, 2)}, tmp_path / "object.pth")
    named = {"trap": r"posix.mkdir", "args": r"posix.mkdir", "object": "fractions.Fraction"}
    for name, what in named.items():
        with pytest.raises(
            UserError, match=rf"{name}.pth: it contains more than tensors \({what}\)"
        ):
            unpack(str(tmp_path / f"{name}.pth"), tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_errors_about_unreadable_files_are_one_line(torch, tmp_path):
    (tmp_path / "damaged.pth").write_bytes(b"PK\x03\x04" + bytes(100))
    torch.save([1, 2], tmp_path / "list.pth")
    cases = {
        "damaged.pth": "torch cannot read it",
        "list.pth": "there are: none",
        "no.pth": "there is no file",
    }
    for name, words in cases.items():
        done = convert(tmp_path / name, tmp_path / "folder")
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, (
            done.stderr
        )
        assert not (tmp_path / "folder").exists()


def test_load_model_refuses_pth_files(torch, tmp_path):
    torch.save({"x": torch.ones(1)}, tmp_path / "model.pth")
    with pytest.raises(UserError, match="pickle"):
        vit_jax.load_model(tmp_path / "model.pth", log=str)
