"""A model from wherever it is: a workdir, Google's npz, timm, Transformers, or the Hugging Face Hub."""

from collections.abc import Callable
from pathlib import Path

from flax import nnx

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint, build, fit, open_checkpoint
from vit_jax.interop.hub import download
from vit_jax.training.workdir import CONFIG, MANIFEST, open_workdir


def load_model(source: str | Path, *, say: Callable[[str], None] = print, **changes) -> nnx.Module:
    """The model that a checkpoint holds, fitted to a new task if one is asked for.

    Args:
      source: the workdir of a run, newest checkpoint, or `WORKDIR@best` (by test accuracy) or
        `WORKDIR@STEP`; a `.npz` file of Google's; a `.safetensors` file or a folder of timm or
        Transformers; `hf://owner/name` or `hf://owner/name@revision`.
      say: is told in a few lines what was found and what became of it.
      **changes: arguments of the model to change, such as `num_classes=10` (a new head of zeros,
        without pre-logits layer; 0 for none) or `image_size=384` (position embeddings resized).

    Raises:
      UserError: there is no such checkpoint, it is damaged, or does not fit.
    """
    checkpoint = open_any(source, changes.get("image_size"))
    values, sources, done = fit(checkpoint, changes)
    say(checkpoint.describe())
    for line in done.describe():
        say(line)
    return build(checkpoint.model, values, sources)


def open_any(source: str | Path, image_size=None) -> Checkpoint:
    """The checkpoint at any source that `load_model` takes."""
    if str(source).startswith("hf://"):
        return open_checkpoint(download(str(source)), image_size)
    path, which = Path(source), ""
    if "@" in path.name and not path.exists():
        name, _, which = str(path).rpartition("@")
        path = Path(name)
    if (path / CONFIG).is_file() and (path / MANIFEST).is_file():
        return open_workdir(path, which)
    if which or not path.exists():
        raise UserError(f"there is no {source}; a checkpoint of the Hub is hf://owner/name")
    return open_checkpoint(path, image_size)
