"""Code examples of a model card that load the model in each library, and their tests.

Before the model is uploaded, each example runs unchanged in a separate process without network
access. The Hub cache of this process contains the folder under the name that it will have on the
Hub. The example's output for an image is compared with the model's output.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

import vit_jax
from vit_jax.checkpoint_crop import checkpoint_crop
from vit_jax.interop.checkpoint import Checkpoint
from vit_jax.interop.image_text import TextPart
from vit_jax.load import build_model
from vit_jax.models.image_model import PROBABILITIES
from vit_jax.models.image_text import ImageTextModel

PICTURE = "photo.jpg"
TOLERANCE = 1e-3  # Relative to the largest value; float32 rounding errors are much smaller.
_COMMIT = "0" * 40
_RESULT = "result.npy"


class Usage(NamedTuple):
    """Code that loads a model and computes its output for an image."""

    title: str  # Name of the library.
    packages: tuple[str, ...]  # Required packages.
    code: str  # Python code, or `$ ` followed by a command.
    # A Python expression for the output, which is evaluated after the code. The output is the
    # probabilities or the features of the image.
    numbers: str
    # True if the output contains only the highest probabilities, in descending order.
    ranked: bool = False


class Tried(NamedTuple):
    """A tested example, and the relative difference between its output and the model's."""

    usage: Usage
    distance: float

    @property
    def versions(self) -> str:
        """Names and versions of the packages with which the example was tested."""
        return ", ".join(f"{name} {_version(name)}" for name in self.usage.packages)


def _version(package: str) -> str:
    """Returns the version of an installed package, or of vit_jax, which need not be installed."""
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
_VIT_JAX_DEPTH = """\
import vit_jax

model = vit_jax.load_depth("hf://{name}")
(depth,) = model.predict("{picture}")  # Metres, float32 [height, width].
print(depth.min(), depth.max())
"""
_TEXTS = ("a photo of a cat", "a photo of a red car", "three dogs")
_TRANSFORMERS_BOTH = """\
import torch
from PIL import Image
from transformers import AutoModel, AutoProcessor

processor = AutoProcessor.from_pretrained("{name}")
model = AutoModel.from_pretrained("{name}").eval()
image = Image.open("{picture}").convert("RGB")
texts = {texts}
tokens = dict(padding="max_length", max_length={length}, truncation=True)
inputs = processor(text=texts, images=image, return_tensors="pt", **tokens)
with torch.inference_mode():
    probabilities = model(**inputs).logits_per_image.{function}[0]
print(dict(zip(texts, probabilities.tolist())))
"""
_VIT_JAX_BOTH = """\
import vit_jax

model = vit_jax.load_image_text("hf://{name}")
texts = {texts}
(prediction,) = model.classifier(texts, templates=["{{}}"]).predict("{picture}")
print(prediction)
"""
_FUNCTIONS = {"softmax": "softmax(-1)", "sigmoid": "sigmoid()"}
_EMBED = (
    "$ python -m vit_jax.predict --checkpoint=hf://{name} --embed=features.safetensors {picture}\n"
)


def usages(
    name: str, form: str, classes: int, named: bool, probabilities: str
) -> list[list[Usage]]:
    """Returns for each library a list of possible usage examples; the best example comes first.

    Args:
      name: `owner/name`.
      form: format of the folder, `timm` or `transformers`.
      classes: number of classes; 0: no head.
      named: True if the classes have names.
      probabilities: name of the function from logits to probabilities: `softmax` or `sigmoid`.
    """
    torch = ("torch", "torchvision")
    packages = ("transformers", *(("timm",) if form == "timm" else ()), *torch)
    fixed = dict(name=name, picture=PICTURE)
    if not classes:
        features = 'features = model(**processor(image, return_tensors="pt"))'
        last = ".last_hidden_state[0"
        read = [
            _TRANSFORMERS.format(**fixed, model="AutoModel", result=features + part)
            for part in (".pooler_output[0]", f"{last}, 0]", f"{last}].mean(0)")
        ]
        timm_code = _TIMM.format(**fixed, result="features = model(transform(image)[None])[0]")
        embedded = 'next(iter(safetensors.numpy.load_file("features.safetensors").values()))'
        found = [
            [Usage("timm", ("timm", *torch), timm_code, "features")],
            [Usage("Transformers", packages, x, "features") for x in read],
            [Usage("vit_jax", ("vit_jax",), _EMBED.format(**fixed), embedded)],
        ]
    else:
        function = _FUNCTIONS[probabilities]
        lines = {name: code.replace("{function}", function) for name, code in _CLASSES.items()}
        if not named:
            first = lines["timm"].splitlines()[0]
            lines["timm"] = f"{first}\nprint(probabilities.argmax().item())\n"
        timm_code = _TIMM.format(**fixed, result=lines["timm"])
        head = "AutoModelForImageClassification"
        read = _TRANSFORMERS.format(**fixed, model=head, result=lines["transformers"])
        found = [
            [Usage("timm", ("timm", *torch), timm_code, "probabilities")],
            [Usage("Transformers", packages, read, "probabilities")],
            [_ranked(_VIT_JAX.format(**fixed))],
        ]
    return found if form == "timm" else found[1:]


def usages_of_depth(name: str) -> list[list[Usage]]:
    """Returns the usage example of a depth run's model with its head, in the form of `usages`."""
    code = _VIT_JAX_DEPTH.format(name=name, picture=PICTURE)
    return [[Usage("vit_jax with the depth head", ("vit_jax",), code, "depth")]]


def usages_of_towers(name: str, length: int, probabilities: str) -> list[list[Usage]]:
    """Returns usage examples of an image-text model: a list for each library, as in `usages`.

    The libraries are Transformers and vit_jax. Each of the two lists contains a single example.

    Args:
      name: `owner/name`.
      length: number of tokens per text.
      probabilities: name of the function from logits to probabilities: `softmax` or `sigmoid`.
    """
    fixed = dict(name=name, picture=PICTURE, texts=json.dumps(_TEXTS))
    code = _TRANSFORMERS_BOTH.format(**fixed, length=length, function=_FUNCTIONS[probabilities])
    packages = ("transformers", "torch", "torchvision")
    return [
        [Usage("Transformers", packages, code, "probabilities")],
        [_ranked(_VIT_JAX_BOTH.format(**fixed))],
    ]


def _ranked(code: str) -> Usage:
    """Returns a usage example for vit_jax with this code, whose output is class probabilities."""
    return Usage("vit_jax", ("vit_jax",), code, "prediction.probabilities", ranked=True)


def try_usages(
    usages_by_library: list[list[Usage]],
    picture: np.ndarray,
    expected: np.ndarray,
    folder: Path,
    name: str,
    log: Callable[[str], None],
) -> list[Tried]:
    """Returns the first example of each library that runs and computes the expected output.

    Args:
      usages_by_library: possible examples of each library, from `usages`.
      picture: the image, uint8 `[height, width, 3]`.
      expected: expected output for the image.
      folder: the future content of `name` on the Hub.
      log: callback that receives a message for each library without a successful example.
    """
    found = []
    with tempfile.TemporaryDirectory() as place:
        Image.fromarray(picture).save(Path(place, PICTURE), "PNG")  # PNG is lossless.
        _put_into_cache(Path(place, "hub"), folder, name)
        for candidates in usages_by_library:
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


def expected_output(checkpoint: Checkpoint) -> tuple[np.ndarray, np.ndarray]:
    """Returns a random image, and the model's output for this image.

    The output is the class probabilities `[classes]`, or the features if the model has no head. The
    image's size is chosen so that the preprocessing crops the image without resizing it.
    """
    model = build_model(checkpoint, log=lambda line: None, dtype="float32")
    picture, images = _picture(checkpoint, model.image_size)
    numbers = np.asarray(model(images))[0]
    if model.num_classes:
        numbers = np.asarray(PROBABILITIES[checkpoint.probabilities](numbers))
    return picture, numbers


def expected_of_towers(
    checkpoint: Checkpoint, text_part: TextPart
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a random image, and the probabilities of the texts `_TEXTS` for this image.

    The usage examples compute the probabilities of the same texts. The image's size is chosen so
    that the preprocessing crops the image without resizing it.

    Args:
      checkpoint: the image tower.
      text_part: the text tower, and the scale and bias of the similarity.
    """
    image = build_model(checkpoint, log=lambda line: None, dtype="float32")
    text = text_part.tower_in("float32"), text_part.logit_scale, text_part.logit_bias
    model = ImageTextModel(image, *text, text_part.probabilities, text_part.tokenizer)
    picture, images = _picture(checkpoint, image.image_size)
    logits = model.logits(model.encode_image(images), model.encode_text(_TEXTS))[0]
    return picture, np.asarray(PROBABILITIES[text_part.probabilities](np.asarray(logits)))


def _picture(checkpoint: Checkpoint, image_size: tuple[int, int]) -> tuple[np.ndarray, jax.Array]:
    """Returns a random image that needs no resize before the crop, and a batch with its crop."""
    crop = checkpoint_crop(checkpoint, image_size)
    # An image of this size is cropped without a resize. Adding 1e-6 prevents `int` from truncating
    # 255.9999999 to 255.
    share = min(image_size) / crop.resize
    sides = (int(side / share + 1e-6) for side in image_size)
    picture = np.random.default_rng(0).integers(0, 256, (*sides, 3), dtype=np.uint8)
    return picture, jnp.asarray(crop(picture))[None]


def _put_into_cache(cache: Path, folder: Path, name: str) -> None:
    """Creates a Hub cache that contains the repository `name`, as a link to `folder`."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "snapshots" / _COMMIT).symlink_to(folder.absolute(), target_is_directory=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(_COMMIT)


def _try(usage: Usage, place: Path, expected: np.ndarray) -> Tried | str:
    """Runs an example; returns it if its output is as expected, else a text with the reason."""
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
    caught = dict(capture_output=True, text=True, errors="replace")
    done = subprocess.run(
        [sys.executable, script.name], cwd=place, env=os.environ | alone, **caught
    )
    if done.returncode or not (place / _RESULT).exists():
        return f"they fail: {(done.stderr.strip().splitlines() or ['no result'])[-1][:300]}"
    found = np.load(place / _RESULT).reshape(-1)
    if usage.ranked:
        expected = np.sort(expected)[::-1][: len(found)]
    if found.shape != expected.shape:
        return f"they give {len(found)} numbers where the model gives {len(expected)}"
    distance = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not distance <= TOLERANCE:  # This is also True if the distance is NaN.
        return f"they compute something else, {distance:.1e} of the largest number off"
    return Tried(usage, distance)
