"""Opens a checkpoint from any source: another library's files, the Hub, or a workdir."""

from importlib import import_module
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint
from vit_jax.interop.hub import download
from vit_jax.interop.reading import open_files
from vit_jax.paths import check_path, is_url, is_workdir, split_checkpoint
from vit_jax.published.unheld import refuse_unheld
from vit_jax.published.weights import all_weights, timm_hint

# Name of the module with `open_workdir`. The module depends on Orbax and the training code;
# therefore it is imported only if the source is a workdir.
WORKDIR_READER = "vit_jax.runs.workdir_reader"


def open_checkpoint(
    source: str | Path, image_size: int | tuple[int, int] | None = None
) -> Checkpoint:
    """Opens a checkpoint from any source that `vit_jax.load_model` supports.

    Args:
      source: a file, a folder, `hf://owner/name`, a workdir or `WORKDIR@best`.
      image_size: image size for which the model is loaded. Few files need it; the function
        `open_files` describes them.

    Raises:
      UserError: the checkpoint does not exist or is damaged, or its model is unsupported.
    """
    check_path(source, "the checkpoint", "a workdir, a file or a folder, or hf://owner/name")
    if str(source).startswith("hf://"):
        return open_files(download(str(source)), image_size)
    path, which = split_checkpoint(source)
    if is_url(source) or is_workdir(path):
        return import_module(WORKDIR_READER).open_workdir(source)
    if which or not Path(path).exists():
        raise _missing(str(source), f"{path}{which and '@' + which}")
    return open_files(Path(path), image_size)


def _missing(source: str, path: str) -> UserError:
    """Returns the error for a source that does not exist.

    If the source is a model name, the error explains how to load this model.

    Raises:
      UserError: the source is the name of an unsupported model.
    """
    refuse_unheld(source)
    if any(weights.model == source for weights in all_weights()):
        return UserError(
            f"there is no {path}; {source} is the name of a model: load_model('{source}', "
            f"pretrained=TAG) loads published weights, list_models('{source}', pretrained=True) "
            "lists their tags, and commands take their hf://owner/name"
        )
    if hint := timm_hint(source):
        return UserError(f"there is no {path}; {hint}; commands take hf://timm/NAME.TAG")
    return UserError(f"there is no {path}; a checkpoint of the Hub is hf://owner/name")
