"""A model from wherever it is: a workdir, Google's npz, timm, Transformers, or the Hugging Face Hub."""

from collections.abc import Callable
from pathlib import Path

from flax import nnx

from vit_jax.interop.checkpoint import Checkpoint, build, fit
from vit_jax.runs.workdir import open_any


def load_model(source: str | Path, *, say: Callable[[str], None] = print, **changes) -> nnx.Module:
    """The model that a checkpoint holds, fitted to a new task if one is asked for.

    Args:
      source: the workdir of a run, newest checkpoint, or `WORKDIR@best` (by test accuracy, else test loss) or
        `WORKDIR@STEP`; a `.npz` file of Google's; a `.safetensors` file or a folder of timm or
        Transformers; `hf://owner/name` or `hf://owner/name@revision`.
      say: is told in a few lines what was found and what became of it.
      **changes: arguments of the model to change, such as `num_classes=10` (a new head of zeros,
        without pre-logits layer; 0 for none) or `image_size=384` (position embeddings resized).

    Raises:
      UserError: there is no such checkpoint, it is damaged, or does not fit.
    """
    return build_model(open_any(source, changes.get("image_size")), say=say, **changes)


def build_model(checkpoint: Checkpoint, *, say: Callable[[str], None] = print, **changes) -> nnx.Module:
    """The model of an open checkpoint, which knows what the model should see; otherwise as `load_model`."""
    values, sources, done = fit(checkpoint, changes)
    say(checkpoint.describe())
    for line in done.describe():
        say(line)
    if values["dtype"] != checkpoint.arguments["dtype"]:
        say(f"computes in {values['dtype']} here")
    return build(checkpoint.model, values, sources)
