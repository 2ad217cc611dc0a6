"""Checkpoints of the Hugging Face Hub."""

import re
from pathlib import Path

from vit_jax.errors import UserError

_FILES = ["config.json", "preprocessor_config.json", "model*.safetensors", "model.safetensors.index.json"]
_FILES += ["objective.json", "objective.safetensors"]


def download(address: str) -> Path:
    """The folder with a model's files, from the Hub or from its cache on this machine.

    Args:
      address: `hf://owner/name`, with `@revision` for another than the newest.

    Raises:
      UserError: it is not on the Hub, or the Hub cannot be reached.
    """
    # Not where a training run would wait for them.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", address)
    if not match:
        raise UserError(f"{address!r} is not of the form hf://owner/name or hf://owner/name@revision")
    name, revision = match.groups()
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=_FILES)
    except GatedRepoError as error:
        raise UserError(
            f"cannot fetch {address}: its owner asks for consent; give it at https://huggingface.co/{name}, "
            "then log in here with: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(f"cannot fetch {address}: it is not there, or it is private") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise UserError(f"cannot fetch {address}: {str(error).strip().splitlines()[0]}") from error
    return Path(folder)
