"""Captions of the examples that `vit_jax.prepare` indexes: their values, columns and storage."""

import json
from collections.abc import Sequence

from vit_jax.data.fields import CAPTION_KEYS, check_captions
from vit_jax.errors import UserError

MOST_BYTES = 2**20  # Of the captions of an image.
MISSING = "images without a caption"
NO_CAPTIONS = ""  # Value of --caption_key that ignores captions.


def encoded(captions: Sequence[str], where: str) -> bytes:
    """Returns captions as bytes; empty bytes if there are none.

    Args:
      captions: the captions of an image.
      where: description of the image, for errors.

    Raises:
      UserError: one is empty or not valid UTF-8, or they are longer than `MOST_BYTES`.
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
    """Returns the captions that `encoded` has stored."""
    return json.loads(stored) if stored else []


def captions_in(value: object, where: str) -> tuple[str, ...]:
    """Returns the captions in a value of JSON or Parquet: a text, a list of texts, or None.

    Empty texts are removed.

    Raises:
      UserError: the value is something else.
    """
    values = value if isinstance(value, list) else [value]
    captions = tuple(one for one in values if one is not None)
    if not all(isinstance(one, str) for one in captions):
        raise UserError(f"{where}: the caption {value!r:.100} is not a text or a list of texts")
    return tuple(one for one in captions if one.strip())


def text_column(path: str, schema, caption_key: str | None) -> str | None:
    """Returns the Parquet column of the captions.

    Args:
      path: the file, for errors.
      schema: its Arrow schema.
      caption_key: its name; `NO_CAPTIONS` for none; None: it is found by its name, if it has texts.

    Raises:
      UserError: there is no such column, or it has other values.
    """
    if caption_key == NO_CAPTIONS:
        return None
    texts = [field.name for field in schema if _is_text(field.type)]
    if caption_key is None:
        return next((name for name in CAPTION_KEYS if name in texts), None)
    if caption_key not in texts:
        reason = (
            f"the column {caption_key!r} has {schema.field(caption_key).type} and no texts"
            if caption_key in schema.names
            else f"there is no column {caption_key!r}"
        )
        raise UserError(
            f"{path}: {reason} (--caption_key); columns of texts are: {', '.join(texts) or 'none'}"
        )
    return caption_key


def _is_text(kind) -> bool:
    """Returns True for the Arrow type of texts or lists of texts."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind)


def missing_error(missing: Sequence[str], count: int, images: int) -> UserError:
    """Returns the error for images without a caption.

    Args:
      missing: names of the first of them.
      count: number of images without a caption.
      images: number of all images.
    """
    names = ", ".join(missing) + (" ..." if count > len(missing) else "")
    return UserError(
        f"{count:,} of {images:,} images have no caption or an empty one: {names}; add them, skip "
        "these images with --skip_uncaptioned, or prepare all without captions with --caption_key="
    )
