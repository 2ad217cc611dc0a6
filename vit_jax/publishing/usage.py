"""Usage examples that load a published model in each library; they are run before publication.

The examples run unchanged, each in a separate process without network access: its Hub cache
contains the folder under its future name. Their outputs for an image are compared with the model's.
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

import vit_jax
from vit_jax.checkpoint_crop import checkpoint_crop
from vit_jax.interop.checkpoint import Checkpoint
from vit_jax.load import build_model

PICTURE = "photo.jpg"
TOLERANCE = 1e-3  # Relative to the largest number; float32 rounding stays far below it.
_COMMIT = "0" * 40
_RESULT = "result.npy"


class Usage(NamedTuple):
    """Code that loads a model and computes its output for an image.

    Attributes:
      title: the library's name.
      packages: required packages.
      code: the code, in Python, or `$ ` and a command.
      numbers: a Python expression, evaluated after the code, for its output: probabilities or
        features of the image.
    """

    title: str
    packages: tuple[str, ...]
    code: str
    numbers: str


class Tried(NamedTuple):
    """Code that was run, and the relative difference of its output from the model's."""

    usage: Usage
    distance: float

    @property
    def versions(self) -> str:
        """The packages that were used, with their versions."""
        return ", ".join(f"{name} {_version(name)}" for name in self.usage.packages)


def _version(package: str) -> str:
    """Returns the version of a package; ours is also known if it runs from a checkout."""
    return vit_jax.__version__ if package == "vit_jax" else importlib.metadata.version(package)


_TIMM = """\
import timm
import torch
from PIL import Image

model = timm.create_model("hf-hub:{name}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
image = Image.open("{picture}").convert("RGB")
with torch.inference_mode():
    {result}
"""
_TRANSFORMERS = """\
import torch
from PIL import Image
from transformers import AutoImageProcessor, {model}

processor = AutoImageProcessor.from_pretrained("{name}")
model = {model}.from_pretrained("{name}").eval()
image = Image.open("{picture}").convert("RGB")
with torch.inference_mode():
    {result}
"""
_CLASSES = {
    "timm": """probabilities = model(transform(image)[None]).{function}[0]
print(model.pretrained_cfg["label_names"][probabilities.argmax()])
""",
    "transformers": """probabilities = model(**processor(image, return_tensors="pt")).logits.{function}[0]
print(model.config.id2label[probabilities.argmax().item()])
""",
}
_VIT_JAX = """\
import vit_jax

model = vit_jax.load_model("hf://{name}")
(prediction,) = model.predict("{picture}")
print(prediction)
"""
_EMBED = (
    "$ python -m vit_jax.predict --checkpoint=hf://{name} --embed=features.safetensors {picture}\n"
)


def usages(
    name: str, form: str, classes: int, named: bool, probabilities: str
) -> list[list[Usage]]:
    """Returns candidates for the usage examples of each library, the best first.

    Args:
      name: `owner/name`.
      form: library of the folder, `timm` or `transformers`.
      classes: number of classes; 0: no head.
      named: the classes have names.
      probabilities: a key of `PROBABILITIES`.
    """
    torch = ("torch", "torchvision")
    through_timm = ("timm",) if form == "timm" else ()
    fixed = dict(name=name, picture=PICTURE)
    if not classes:
        features = 'features = model(**processor(image, return_tensors="pt"))'
        read = [
            _TRANSFORMERS.format(**fixed, model="AutoModel", result=features + part)
            for part in (
                ".pooler_output[0]",
                ".last_hidden_state[0, 0]",
                ".last_hidden_state[0].mean(0)",
            )
        ]
        theirs = _TIMM.format(**fixed, result="features = model(transform(image)[None])[0]")
        embedded = 'next(iter(safetensors.numpy.load_file("features.safetensors").values()))'
        found = [
            [Usage("timm", ("timm", *torch), theirs, "features")],
            [
                Usage("Transformers", ("transformers", *through_timm, *torch), x, "features")
                for x in read
            ],
            [Usage("vit_jax", ("vit_jax",), _EMBED.format(**fixed), embedded)],
        ]
    else:
        function = {"softmax": "softmax(-1)", "sigmoid": "sigmoid()"}[probabilities]
        lines = {
            library: code.replace("{function}", function) for library, code in _CLASSES.items()
        }
        if not named:
            lines["timm"] = (
                lines["timm"].splitlines()[0] + "\nprint(probabilities.argmax().item())\n"
            )
        theirs = _TIMM.format(**fixed, result=lines["timm"])
        head = "AutoModelForImageClassification"
        read = _TRANSFORMERS.format(**fixed, model=head, result=lines["transformers"])
        found = [
            [Usage("timm", ("timm", *torch), theirs, "probabilities")],
            [Usage("Transformers", ("transformers", *through_timm, *torch), read, "probabilities")],
            [Usage("vit_jax", ("vit_jax",), _VIT_JAX.format(**fixed), "prediction.probabilities")],
        ]
    return found if form == "timm" else found[1:]


def try_usages(
    wanted: list[list[Usage]],
    checkpoint: Checkpoint,
    folder: Path,
    name: str,
    log: Callable[[str], None],
) -> list[Tried]:
    """Returns the first example of each library that runs and matches the checkpoint's model.

    Args:
      folder: the future content of `name` on the Hub.
      log: called with a message for each library without such an example.
    """
    found = []
    with tempfile.TemporaryDirectory() as place:
        picture, expected = _expected(checkpoint)
        Image.fromarray(picture).save(Path(place, PICTURE), "PNG")  # PNG is lossless.
        _put_into_cache(Path(place, "hub"), folder, name)
        for candidates in wanted:
            why = []
            for usage in candidates:
                outcome = _try(usage, Path(place), expected)
                if isinstance(outcome, Tried):
                    found.append(outcome)
                    break
                why.append(outcome)
            else:
                log(f"note: the card shows no lines for {candidates[0].title}: {why[0]}")
    return found


def _expected(checkpoint: Checkpoint) -> tuple[np.ndarray, np.ndarray]:
    """Returns a random image that needs no resize, and the model's output for it.

    The output is probabilities, or features of a model without a head.
    """
    import jax.numpy as jnp

    from vit_jax.models.image_model import PROBABILITIES

    model = build_model(checkpoint, log=lambda line: None, dtype="float32")
    crop = checkpoint_crop(checkpoint, model.image_size)
    # An image of this size is cropped without a resize. By 1e-6, `int` does not truncate 255.9999999
    # to 255.
    share = min(model.image_size) / crop.resize
    sides = (int(side / share + 1e-6) for side in model.image_size)
    picture = np.random.default_rng(0).integers(0, 256, (*sides, 3), dtype=np.uint8)
    images = jnp.asarray(crop(picture))[None]
    numbers = np.asarray(model(images))[0]
    if model.num_classes:
        numbers = np.asarray(PROBABILITIES[checkpoint.probabilities](numbers))
    return picture, numbers


def _put_into_cache(cache: Path, folder: Path, name: str) -> None:
    """Links a folder into a new cache of huggingface_hub as the repository `name`."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "snapshots" / _COMMIT).symlink_to(folder.absolute(), target_is_directory=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(_COMMIT)


def _try(usage: Usage, place: Path, expected: np.ndarray) -> Tried | str:
    """Returns the example with its difference, or the reason why it is not shown."""
    if missing := [name for name in usage.packages if importlib.util.find_spec(name) is None]:
        return f"not tried, since {', '.join(missing)} cannot be imported here"
    (place / _RESULT).unlink(missing_ok=True)
    script, code = place / "usage.py", usage.code
    if command := re.match(r"\$ python (.*)", code):
        code = f"import subprocess, sys\nsubprocess.run([sys.executable, *{command[1].split()}])\n"
    numbers = f"numpy.save({_RESULT!r}, numpy.asarray({usage.numbers}, numpy.float32))\n"
    script.write_text(f"{code}\nimport numpy\nimport safetensors.numpy\n\n{numbers}")
    alone = dict(HF_HUB_CACHE=str(place / "hub"), HF_HUB_OFFLINE="1", JAX_PLATFORMS="cpu")
    alone |= dict(CUDA_VISIBLE_DEVICES="", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=place,
        env=os.environ | alone,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode or not (place / _RESULT).exists():
        return f"they fail: {(done.stderr.strip().splitlines() or ['no result'])[-1][:300]}"
    found = np.load(place / _RESULT).reshape(-1)
    if len(found) < len(expected):  # Only the most likely classes.
        expected = np.sort(expected)[::-1][: len(found)]
    if found.shape != expected.shape:
        return f"they give {len(found)} numbers where the model gives {len(expected)}"
    distance = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not distance <= TOLERANCE:  # Also if it is NaN.
        return f"they compute something else, {distance:.1e} of the largest number off"
    return Tried(usage, distance)
