"""Downloads models from the Hugging Face Hub, and uploads models to it."""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from vit_jax.errors import UserError

_CONFIGS = ["config.json", "preprocessor_config.json"]
_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]
_WEIGHTS += ["objective.json", "objective.safetensors"]

# Errors that huggingface_hub raises for malformed responses, such as an HTML page or a truncated
# response.
_OTHERS = (LookupError, TypeError, AttributeError, AssertionError)
_MALFORMED = (ValueError, *_OTHERS)


def download(address: str, more: Sequence[str] = (), *, weights: bool = True) -> Path:
    """Downloads a model's files from the Hub, or finds them in the cache; returns their folder.

    Args:
      address: `hf://owner/name` for the newest revision, or `hf://owner/name@revision`.
      more: names of further files to download, if the repository has them.
      weights: also download the weights, in the formats that `load_model` supports.

    Raises:
      UserError: the model is not on the Hub, or the Hub cannot be reached.
    """
    # huggingface_hub is imported in this function, because the import is slow and training runs do
    # not need it.
    from httpx2 import HTTPError  # The HTTP client of huggingface_hub.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", address)
    if not match:
        raise UserError(
            f"{address!r} is not of the form hf://owner/name or hf://owner/name@revision"
        )
    name, revision = match.groups()
    page = f"{constants.ENDPOINT}/{name}"
    try:
        files = [*_CONFIGS, *(_WEIGHTS if weights else ()), *more]
        folder = snapshot_download(name, revision=revision, allow_patterns=files)
    except GatedRepoError as error:
        raise UserError(
            f"cannot fetch {address}: its owner requires consent; give it at {page}, "
            "then log in here with: hf auth login"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(
            f"cannot fetch {address}: it has no revision {revision!r}; {page}/commits shows those "
            "that it has"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"cannot fetch {address}: there is no {page}, or it is private; look at the name, or "
            "log in here with: hf auth login"
        ) from error
    except HFValidationError as error:
        raise UserError(
            f"{address!r} is not a valid name on the Hub: {_first_line(error)}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"cannot fetch {address}: {_unreachable()}, and this machine's cache does not have it"
        ) from error
    except (HTTPError, OSError) as error:
        raise UserError(
            f"cannot fetch {address}: {_first_line(error)}; {page} may explain why"
        ) from error
    except _MALFORMED as error:
        raise UserError(f"cannot fetch {address}: {_not_the_hub()}") from error
    return Path(folder)


def check_upload(name: str, replace: bool) -> None:
    """Checks in advance that a model can be uploaded to the Hub under a name.

    Args:
      name: `owner/name`.
      replace: if True, the repository may exist, and its model will be replaced. If False, the
        repository must not exist.

    Raises:
      UserError: the token is missing or has no write access, or the name is invalid or taken.
    """
    from huggingface_hub import HfApi, constants, get_token

    if get_token() is None:
        raise UserError(
            f"there is no token for {constants.ENDPOINT}: log in with `hf auth login`, or set "
            f"HF_TOKEN to one that may write, which is made at {_tokens()}"
        )
    api = HfApi()
    with _mistakes(name):
        user = api.whoami()
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise UserError(
                f"the token of {user['name']} may only read: log in with `hf auth login`, or set "
                f"HF_TOKEN, with one that may write, which is made at {_tokens()}"
            )
        if not replace and api.repo_exists(name):
            raise UserError(_taken(name))


def upload(folder: Path, name: str, public: bool, replace: bool) -> str:
    """Uploads a folder to the Hub as a model, in one commit.

    Args:
      folder: the folder.
      name: `owner/name`.
      public: True for a new public repository, False for a new private repository.
      replace: True if the repository may exist. Its model files are then replaced, and its
        visibility does not change.

    Returns:
      A text with the URL of the repository and its visibility.

    Raises:
      UserError: the Hub rejects the upload.
    """
    from huggingface_hub import HfApi, ModelCard

    api = HfApi()
    with _mistakes(name):
        ModelCard.load(folder / "README.md").validate()
        address = api.create_repo(name, private=not public, exist_ok=replace)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Add the model",
            delete_patterns=[*_CONFIGS, *_WEIGHTS] if replace else None,
        )
        seen = "private" if api.model_info(name).private else "public"
    return f"{address} ({seen})"


@contextlib.contextmanager
def _mistakes(name: str) -> Iterator[None]:
    """Converts errors of the Hub to UserErrors, whose messages explain how to fix the problem."""
    from httpx2 import HTTPError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except UserError:
        raise
    except HFValidationError as error:
        raise UserError(
            f"{name!r} is not a valid name for the Hub: {_first_line(error)}"
        ) from error
    except HfHubHTTPError as error:
        owner = name.split("/")[0]
        known = {
            401: "the Hub rejects this token: log in again with `hf auth login`, or set "
            f"HF_TOKEN to one of {_tokens()}",
            403: f"this token may not write to {owner}: give another name, or a token of "
            f"{_tokens()} that may write there ({_first_line(error)})",
            409: _taken(name),
        }
        message = known.get(error.response.status_code, f"cannot send {name}: {_first_line(error)}")
        raise UserError(message) from error
    except (HTTPError, ConnectionError) as error:
        raise UserError(f"cannot send {name}: {_unreachable()} ({_first_line(error)})") from error
    except (json.JSONDecodeError, *_OTHERS) as error:
        raise UserError(f"cannot send {name}: {_not_the_hub()}") from error
    except ValueError as error:  # The Hub rejects the metadata of the model card.
        raise UserError(
            f"the Hub rejects the card's metadata: {_card_errors(str(error))}"
        ) from error


def _card_errors(answer: str) -> str:
    """Returns the errors in the model card's metadata, extracted from the Hub's response."""
    try:
        found = "; ".join(one["message"] for one in json.loads(answer)["errors"])
    except (ValueError, LookupError, TypeError):
        found = ""
    return found or " ".join(answer.split())[:300]


def _taken(name: str) -> str:
    return (
        f"{name} is on the Hub already: give another name, or --replace to put this model in its "
        "place"
    )


def _tokens() -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/settings/tokens"


def _not_the_hub() -> str:
    """Returns an error message for a response that is not from the Hub, with likely causes."""
    from huggingface_hub import constants

    return (
        f"the answer from {constants.ENDPOINT} is not the Hub's; a login page of this network or "
        "a proxy may stand before it: open it in a browser, or look at HF_ENDPOINT"
    )


def _unreachable() -> str:
    """Returns an error message for an unreachable Hub, with the likely cause."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE disables requests to the Hub: unset it"
    return f"{constants.ENDPOINT} is not reached: look at the network, or at HF_ENDPOINT"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
