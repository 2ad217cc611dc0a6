"""Reads PyTorch files, such as `.pth`, in which authors publish weights.

Files are read by `torch.load(weights_only=True)` in a separate process; torch must be installed.
With this argument torch reads only tensors and plain values, and runs no code from the file. Only
`vit_jax.convert` reads such files; all other commands reject pickles.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from vit_jax.errors import UserError
from vit_jax.interop import openai, timm
from vit_jax.interop.depth_heads import START as DEPTH_HEAD
from vit_jax.interop.objective_files import write_objective_files
from vit_jax.interop.projection_heads import OWNS, read_heads
from vit_jax.interop.tensor_files import TORCH_MODEL
from vit_jax.interop.tensor_files import TORCH_SUFFIXES as SUFFIXES
from vit_jax.interop.timm.authors import PIXELS, as_timm, renamed
from vit_jax.interop.timm.timm_vit import with_registers
from vit_jax.models.text_tokens import OPEN_CLIP, TOKENIZER_FILES

# Maps the name of a pickle to the names of two files: the JSON file in the same folder that
# describes the model, and the safetensors file to write.
_DESCRIBED = {
    TORCH_MODEL: ("config.json", "model.safetensors"),
    "open_clip_pytorch_model.bin": (OPEN_CLIP, "open_clip_model.safetensors"),
}
READ = "read.safetensors"  # Name of the file to which a PyTorch file's tensors are extracted.
OLDEST_TORCH = (2, 6)  # Older versions run code in spite of weights_only=True (CVE-2025-32434).

# The program of the separate process. It finds the tensors at the given key, or at the only key
# with tensors, and saves them together with the state of the training losses. `argparse.Namespace`
# is allowed, because in many checkpoints the training arguments are such an object of plain values.
_READ = f"""
import argparse, re, sys
import torch
from safetensors.torch import save_file
source, destination, key = sys.argv[1:]
if tuple(map(int, re.findall(r"\\d+", torch.__version__)[:2])) < {OLDEST_TORCH}:
    sys.exit(f"torch {{torch.__version__}} is too old to read it safely; install torch 2.6 or later")
torch.serialization.add_safe_globals([argparse.Namespace])
try:
    content = torch.load(source, map_location="cpu", weights_only=True)
except Exception as error:
    if "weights_only" not in str(error).lower() and "unsupported" not in str(error).lower():
        sys.exit(f"torch cannot read it: {{str(error).splitlines()[0]}}")
    found = re.search(r"GLOBAL ([\\w.]+)", str(error))
    what = found[1] if found else "other objects"
    advice = "if you trust it, load it with its packages and torch.save(model.state_dict(), 'FILE.pth')"
    sys.exit(f"it contains more than tensors ({{what}}), which are not unpickled; {{advice}}")

def tensors(value):
    return isinstance(value, dict) and value and all(isinstance(x, torch.Tensor) for x in value.values())

if isinstance(content, dict) and tensors(content.get("model")):
    parts = {{}}
    for name, x in content["model"].items():
        parts.setdefault(name.partition(".")[0], {{}})[name.partition(".")[2]] = x
    if {{"student", "teacher"}} <= parts.keys():
        content = parts
losses = {{}}
if not tensors(content):
    inside = [name for name, value in content.items() if tensors(value)] if isinstance(content, dict) else []
    losses = {{name: content[name] for name in inside if str(name).endswith("_loss")}}
    inside = [name for name in inside if name not in losses]
    if key and key not in inside or not inside or len(inside) > 1 and not key:
        there = ", ".join(map(str, inside)) or "none"
        sys.exit(f"tensors are asked for by their key, FILE@KEY; there are: {{there}}")
    content = content[key or inside[0]]
content = content | {{f"{{loss}}.{{name}}": x for loss, held in losses.items() for name, x in held.items()}}
floats = {{name: x.detach().clone().contiguous() for name, x in content.items() if x.is_floating_point()}}
save_file(floats, destination)
"""

# _PREFIXES matches the prefixes that wrappers add to tensor names, such as Lightning's `model` and
# `net`. _RENAMED maps authors' tensor names to timm's names.
_PREFIXES = {r"^(module\.|model\.|net\.|backbone\.|encoder\.|_orig_mod\.)+": ""}
_RENAMED = {
    "register_tokens": "reg_token",
    r"\.mlp\.w12\.": ".mlp.fc1.",
    r"\.mlp\.w3\.": ".mlp.fc2.",
    # In some files blocks are grouped in chunks. The number of the chunk is removed, because blocks
    # are numbered across all chunks.
    r"^blocks\.\d+\.(?=\d+\.)": "blocks.",
}
# Names of parameters that were used in pre-training only: mask tokens, decoders, projection heads.
# They are skipped unless they can initialize a training objective.
_LEFT_OUT = (
    r"^(mask_token|masked_embed|decoder|head\.(mlp|last_layer)|dino_head|ibot_head|\w+_loss\.)"
)
_LEFT_OUT += r"|^(projectors?|predictor|lm_head|cls_pt_layers|local_cls_norm)\b"
# FCMAE's decoder also has tensors `proj` and `pred`. They are skipped only in ConvNeXt's files,
# because other models can have tensors with these names.
_LEFT_OUT_OF_CONVNEXT = _LEFT_OUT + r"|^(proj|pred)\b"


def is_torch_file(source: str) -> bool:
    """Returns True for the path of a PyTorch file, such as `a.pth` or `a.pth@KEY`.

    KEY is the key of a dict of tensors in the file.
    """
    return source.rpartition("@")[0].endswith(SUFFIXES) or source.endswith(SUFFIXES)


def refuse_module(source: str) -> None:
    """Raises UserError for a pickled module; the message explains how to save its tensors."""
    if source.endswith(".pkl"):
        raise UserError(
            f"{source} is a pickle, which can run any code and is never loaded: if you trust it, "
            f"and with its authors' package installed, torch.save(torch.load({source!r}, "
            "weights_only=False).state_dict(), 'FILE.pth') writes its tensors, and FILE.pth is "
            "supported"
        )


def unpack(source: str, folder: Path, pixels: str | None = None) -> tuple[Path, list[str]]:
    """Converts a PyTorch file to a checkpoint that vit_jax can read, usually in timm's format.

    - DINO's projection heads are written to additional files of the checkpoint.
    - If a JSON file next to the PyTorch file describes the model, such as `config.json` next to
      `pytorch_model.bin`, the names of the tensors do not change, and the JSON files are copied.
    - float64 is rounded to float32.

    Args:
      source: path of the file. For a file that contains several dicts of tensors, the path is
        followed by `@` and the dict's key, such as `FILE@teacher`.
      folder: an empty folder for the converted files.
      pixels: mean and std of the preprocessing, a key of `PIXELS`. None: the values that the
        authors use.

    Returns:
      The folder, and notes about skipped tensors and assumptions.

    Raises:
      UserError: the file does not exist, torch 2.6 or later is not installed, the file contains
        objects other than tensors, it contains several dicts of tensors and no key is given, or
        `as_timm` does not support the model.
    """
    path, read = _path_and_key(source)[0], folder / READ
    loaded, notes = read_tensors(source, folder)
    config, weights = _DESCRIBED.get(Path(path).name, ("", ""))
    if config and (described := Path(path).with_name(config)).is_file():
        read.unlink()
        return _write_with_config_files(loaded, folder, described, weights, pixels), notes
    if any(name.startswith(DEPTH_HEAD) for name in loaded):
        raise UserError(
            f"{path} is a head of dense prediction, without its backbone: python -m vit_jax.convert "
            f"BACKBONE FOLDER --depth_head={path} writes both, if it is a depth head of DINOv2"
        )
    named = [(renamed(name, _PREFIXES | _RENAMED), array) for name, array in loaded.items()]
    if openai.LIBRARY.claims(read, {}, dict(named)):
        place, more = _of_openai(dict(named), read, pixels)
        return place, notes + more
    read.unlink()
    try:
        return folder, notes + _convert_to_timm(named, folder, pixels)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def read_tensors(source: str, folder: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the tensors of a PyTorch file by name, and a note if float64 was rounded to float32.

    Args:
      source: path of the file, or `FILE@KEY` if it contains several dicts of tensors.
      folder: an existing folder, in which the tensors are written to the new file `READ`.

    Raises:
      UserError: the file does not exist, torch 2.6 or later is not installed, the file contains
        objects other than tensors, or it contains several dicts of tensors and no key is given.
    """
    path, key = _path_and_key(source)
    if not path.endswith(SUFFIXES):
        raise UserError(f"{source} is no file of PyTorch, which ends in {', '.join(SUFFIXES)}")
    if not Path(path).is_file():
        raise UserError(f"there is no file {path}")
    _read(path, key, folder / READ)
    return _load(folder / READ)


def _path_and_key(source: str) -> tuple[str, str]:
    """Splits `FILE@KEY` into path and key; without `@KEY`, the key is empty."""
    path, _, key = (source, "", "") if source.endswith(SUFFIXES) else source.rpartition("@")
    return path, key


def _convert_to_timm(named: list[tuple[str, Any]], folder: Path, pixels: str | None) -> list[str]:
    """Writes the tensors of an author's file to a timm checkpoint; returns notes for the user.

    `folder` must be empty. `pixels` is the mean and std of the preprocessing, a key of `PIXELS`;
    None: the values that the authors use.
    """
    heads, notes = None, []
    try:
        heads = read_heads({name: array for name, array in named if OWNS.match(name)})
    except UserError as error:
        notes.append(f"the heads are skipped: {error}")
    if heads:
        named = [(name, array) for name, array in named if not OWNS.match(name)]
    tensors, skipped = _model_tensors(named)
    registers = 0
    if "reg_token" in tensors:
        if tensors["reg_token"].ndim != 3:
            shape = list(tensors["reg_token"].shape)
            raise UserError(f"register tokens of the shape {shape}; expected [1, registers, dim]")
        registers = tensors["reg_token"].shape[1]
    tensors = with_registers(tensors, dict(registers=registers))
    tensors, config, assumptions = as_timm(tensors, pixels)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    if heads:
        write_objective_files(folder, "dino", heads.values, heads.params, heads.state)
        notes.extend(heads.notes)
    prefixes = sorted({name.split(".")[0] for name in skipped})
    notes.extend(f"skipped, used in pre-training only: {prefix}" for prefix in prefixes)
    return [*notes, *assumptions, _preprocessing_note(config["pretrained_cfg"])]


def _model_tensors(named: list[tuple[str, Any]]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the model's tensors by name, and the names of tensors used in pre-training only.

    Raises:
      UserError: two tensors have the same name.
    """
    form = next((form for form in timm.LIBRARY.formats if form.claims({}, dict(named))), None)
    is_convnext = any(name.startswith("downsample_layers.") for name, _ in named)
    skip = _LEFT_OUT_OF_CONVNEXT if is_convnext else _LEFT_OUT
    keep = form.objective.owns if form and form.objective else "$"
    tensors, skipped = {}, []
    for name, array in named:
        if re.match(skip, name) and not re.match(keep, name):
            skipped.append(name)
            continue
        if name in tensors:
            raise UserError(f"two tensors have the name {name} when their prefixes are removed")
        tensors[name] = array
    return tensors, skipped


def _preprocessing_note(preprocessing: dict) -> str:
    """Returns a line for the user about the assumed preprocessing, a `pretrained_cfg` of timm."""
    name = next(name for name, pixels in PIXELS.items() if pixels["mean"] == preprocessing["mean"])
    if "crop_mode" in preprocessing:
        crop = "all of the image, squeezed"
    elif preprocessing["crop_pct"] == 1:
        crop = "all of the image's square"
    else:
        crop = "a crop of 7/8"
    return f"assumed: pixels by the mean and std `{name}`, {crop}, bicubic"


def _read(path: str, key: str, destination: Path) -> None:
    """Runs a process that writes the tensors of a PyTorch file to a safetensors file.

    Raises:
      UserError: the file cannot be read, or contains objects other than tensors.
    """
    done = subprocess.run(
        [sys.executable, "-I", "-c", _READ, path, str(destination), key],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        missing = re.search(r"No module named '(\w+)'", lines[-1])
        words = (
            f"{missing[1]} is needed to read it: pip install {missing[1]}" if missing else lines[-1]
        )
        raise UserError(f"{path}: {words}")


def _load(file: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the tensors of a safetensors file, and a note if float64 was rounded to float32."""
    loaded = load_file(file)
    doubles = [name for name, array in loaded.items() if array.dtype == np.float64]
    rounded = loaded | {name: loaded[name].astype(np.float32) for name in doubles}
    line = (
        f"rounded from float64 to float32: {len(doubles):,} tensors, such as "
        f"{min(doubles, default='')}"
    )
    return rounded, [line] if doubles else []


def _write_with_config_files(
    tensors: dict[str, np.ndarray], folder: Path, described: Path, weights: str, pixels: str | None
) -> Path:
    """Writes tensors with unchanged names to a folder, and copies the library's JSON files.

    `described` is the path of the JSON file that describes the model, and `weights` the name of the
    new weights file.

    Raises:
      UserError: `pixels` is given, but the JSON files define the normalization.
    """
    if pixels is not None:
        raise UserError(
            f"--pixels={pixels} does not apply: {described} defines the normalization of pixels"
        )
    save_file(tensors, folder / weights)
    for name in (described.name, "preprocessor_config.json", *TOKENIZER_FILES):
        if (file := described.with_name(name)).is_file():
            shutil.copy(file, folder)
    return folder


def _of_openai(
    tensors: dict[str, np.ndarray], read: Path, pixels: str | None
) -> tuple[Path, list[str]]:
    """Writes DALL-E's encoder with unchanged names; returns the result of `unpack`.

    Raises:
      UserError: `pixels` is given, although this encoder has a fixed normalization.
    """
    if pixels is not None:
        raise UserError(
            f"--pixels={pixels} is not for DALL-E's encoder, which maps pixels in its own way"
        )
    read.unlink()
    save_file(tensors, read.parent / "model.safetensors")
    return read.parent, [
        "assumed: pixels in [0, 1] as 0.8 times them and 0.1, as OpenAI's code maps them"
    ]
