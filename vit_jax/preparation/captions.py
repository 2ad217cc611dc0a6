"""Captions in `vit_jax.prepare`: reads and checks them, and encodes them for the index."""

import json
from collections.abc import Sequence

from vit_jax.data.fields import CAPTION_KEYS, check_captions
from vit_jax.errors import UserError

MOST_BYTES = 2**20  # Maximum size of all captions of an image.
MISSING = "images without a caption"
NO_CAPTIONS = ""  # Value of --caption_key that ignores captions.


def encoded(captions: Sequence[str], where: str) -> bytes:
    """Encodes the captions of an image as bytes. Without captions the result is empty.

    Raises:
      UserError: a caption is empty or not valid UTF-8, or the captions exceed `MOST_BYTES`.
    """
    if not captions:
        return b""
    stored = json.dumps(check_captions(captions, where), ensure_ascii=False).encode()
    if len(stored) > MOST_BYTES:
        raise UserError(
            f"{where} has captions of {len(stored):,} bytes; the limit is {MOST_BYTES:,}"
        )
    return stored


def decoded(stored: bytes) -> list[str]:
    """Decodes captions from the bytes that `encoded` has returned."""
    return json.loads(stored) if stored else []


def captions_in(value: object, where: str) -> tuple[str, ...]:
    """Returns the captions in a JSON or Parquet value. Empty texts are removed.

    Raises:
      UserError: the value is neither a text, nor a list of texts, nor None.
    """
    values = value if isinstance(value, list) else [value]
    captions = tuple(one for one in values if one is not None)
    if not all(isinstance(one, str) for one in captions):
        raise UserError(f"{where}: the caption {value!r:.100} is not a text or a list of texts")
    return tuple(one for one in captions if one.strip())


def text_column(path: str, schema, caption_key: str | None) -> str | None:
    """Returns the name of the Parquet column with captions; None: no such column.

    Args:
      schema: the file's Arrow schema.
      caption_key: name of the column. `NO_CAPTIONS`: captions are ignored. None: a text column with
        one of the usual names is searched.

    Raises:
      UserError: the column does not exist, or does not contain text.
    """
    if caption_key == NO_CAPTIONS:
        return None
    texts = [field.name for field in schema if _is_text(field.type)]
    if caption_key is None:
        return next((name for name in CAPTION_KEYS if name in texts), None)
    if caption_key not in texts:
        reason = f"there is no column {caption_key!r}"
        if caption_key in schema.names:
            kind = schema.field(caption_key).type
            reason = f"the column {caption_key!r} has {kind} and no texts"
        raise UserError(
            f"{path}: {reason} (--caption_key); columns of texts are: {', '.join(texts) or 'none'}"
        )
    return caption_key


def _is_text(kind) -> bool:
    """Returns True if an Arrow type is text or a list of texts."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind)


def missing_error(missing: Sequence[str], count: int, images: int) -> UserError:
    """Returns the error for images without a caption; `missing` names the first ones."""
    names = ", ".join(missing) + (" ..." if count > len(missing) else "")
    return UserError(
        f"{count:,} of {images:,} images have no caption or an empty one: {names}; add them, skip "
        "these images with --skip_uncaptioned, or prepare all without captions with --caption_key="
    )
