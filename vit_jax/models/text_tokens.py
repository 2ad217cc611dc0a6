"""Tokenizers of text towers: the bytes of UTF-8, or a folder's files, read by their own libraries.

CLIP and SigLIP 2 have a `tokenizer.json` of Hugging Face's tokenizers (CLIP also `vocab.json` and
`merges.txt`); SigLIP has a `spiece.model` of SentencePiece.
"""

import hashlib
import json
import re
import string
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.small_files import read_small

# Read from the Hub in addition to the model's files.
TOKENIZER_FILES = (
    *("tokenizer.json", "spiece.model", "vocab.json", "merges.txt"),
    *("tokenizer_config.json", "special_tokens_map.json"),
)
BYTES = "bytes"  # The tokenizer without files.
_FILES = "tokenizer.json, spiece.model, or vocab.json and merges.txt"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLIP_WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


class Tokenizer:
    """Converts texts to tokens of a fixed length; warns once of a text that is truncated.

    Args:
      encode: returns the tokens of each text, with special tokens, at most `length` of them, and
        whether it was truncated.
      length: number of tokens of a text.
      padding: token behind the end.
      vocabulary: number of tokens that exist.
    """

    def __init__(
        self,
        encode: Callable[[list[str]], list[tuple[list[int], bool]]],
        length: int,
        padding: int,
        vocabulary: int,
    ):
        self._encode, self.length, self.padding = encode, length, padding
        self.vocabulary, self._warned = vocabulary, False

    @property
    def end(self) -> int:
        """The token that ends each text."""
        ((tokens, _),) = self._encode([""])
        return tokens[-1] if tokens else self.padding

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Returns tokens, int32 `[texts, length]`.

        Raises:
          UserError: there are no texts, or one is not a string.
        """
        texts = list(texts)
        if not texts:
            raise UserError("there are no texts to encode: give one or more")
        for text in texts:
            if not isinstance(text, str):
                raise UserError(f"a text is a {type(text).__name__}, and must be a str: {text!r}")
        tokens = np.full((len(texts), self.length), self.padding, np.int32)
        for text, row, (found, truncated) in zip(texts, tokens, self._encode(texts), strict=True):
            row[: len(found)] = found
            if truncated and not self._warned:
                self._warned = True
                warnings.warn(
                    f"a text is truncated to the tower's {self.length} tokens: {text[:60]!r} ...",
                    stacklevel=2,
                )
        return tokens


def open_tokenizer(
    folder: Path, length: int, lower_case: bool, vocabulary: int | None = None
) -> Tokenizer:
    """Opens the tokenizer in a checkpoint's folder.

    Args:
      folder: the folder with its files; `bytes`: the bytes of UTF-8.
      length: number of tokens of a text.
      vocabulary: number of tokens of the text tower; None: the tokenizer's.
      lower_case: the tower was trained on lower-cased texts (SigLIP).

    Raises:
      UserError: there is no tokenizer, it is damaged, its library is not installed, or it has more
        tokens than the tower.
    """
    if str(folder) == BYTES:
        return _of_bytes(length)
    if (folder / "spiece.model").is_file():
        return _of_sentencepiece(folder / "spiece.model", length, vocabulary)
    if (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file():
        return _of_tokenizers(folder, length, lower_case, vocabulary)
    raise UserError(
        f"there is no tokenizer in {folder} ({_FILES}): copy it from the checkpoint's page"
    )


def tokenizer_identity(folder: Path) -> str:
    """Returns a hash of a tokenizer's files; `bytes` has none."""
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    made_of = hashlib.blake2b(digest_size=8)
    for file in files:
        made_of.update(file.name.encode() + b"\0" + file.read_bytes())
    return made_of.hexdigest() if files else str(folder)


def _of_bytes(length: int) -> Tokenizer:
    """Returns the tokenizer of UTF-8 bytes: 0 is padding, 1 the end, and byte b is b + 2."""

    def encode(texts: list[str]) -> list[tuple[list[int], bool]]:
        found = [[byte + 2 for byte in text.encode(errors="replace")] for text in texts]
        return [([*tokens[: length - 1], 1], len(tokens) >= length) for tokens in found]

    return Tokenizer(encode, length, 0, 258)


def _check_size(file: Path, tokens: int, vocabulary: int | None) -> None:
    if vocabulary is not None and tokens > vocabulary:
        raise UserError(
            f"{file} has {tokens:,} tokens, but the text tower has {vocabulary:,}: it is the "
            "tokenizer of another model"
        )


def _special_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens that the JSON files of a tokenizer name, such as `pad_token`."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        try:
            content = json.loads(read_small(folder / name))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{folder / name} cannot be read: {error}") from error
        for key, value in content.items() if isinstance(content, dict) else ():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def _of_tokenizers(
    folder: Path, length: int, lower_case: bool, vocabulary: int | None
) -> Tokenizer:
    """Opens the files of Hugging Face's tokenizers."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("tokenizers is not installed: pip install tokenizers") from error
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            made = tokenizers.Tokenizer.from_file(str(file))
        else:
            file = folder / "vocab.json"
            made = _clip_tokenizer(tokenizers, folder)
    except Exception as error:  # The library raises plain exceptions.
        raise UserError(f"{file} is damaged: {error}") from error
    # Numbers of tokens may have gaps.
    tokens = 1 + max(made.get_vocab().values(), default=-1)
    _check_size(file, tokens, vocabulary)
    special = _special_tokens(folder)
    padding = special.get("pad_token") or special.get("eos_token") or ""
    if (pad := made.token_to_id(padding)) is None:
        raise UserError(
            f"the padding token {padding!r} of {folder} is not in its vocabulary: add pad_token to "
            "tokenizer_config.json"
        )
    made.no_padding()
    made.enable_truncation(length)

    def encode(texts: list[str]) -> list[tuple[list[int], bool]]:
        texts = [text.lower() for text in texts] if lower_case else texts
        return [(one.ids, bool(one.overflowing)) for one in made.encode_batch(texts)]

    return Tokenizer(encode, length, pad, tokens)


def _clip_tokenizer(tokenizers: Any, folder: Path) -> Any:
    """Returns CLIP's byte-pair tokenizer from its vocabulary and merges."""
    start, end = "<|startoftext|>", "<|endoftext|>"
    model = tokenizers.models.BPE.from_file(
        str(folder / "vocab.json"),
        str(folder / "merges.txt"),
        continuing_subword_prefix="",
        end_of_word_suffix="</w>",
        unk_token=end,
    )
    made = tokenizers.Tokenizer(model)
    normalizers, pre_tokenizers = tokenizers.normalizers, tokenizers.pre_tokenizers
    spaces = normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    made.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    words = pre_tokenizers.Split(tokenizers.Regex(_CLIP_WORDS), behavior="removed", invert=True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.add_special_tokens([start, end])
    ids = [(name, made.token_to_id(name)) for name in (start, end)]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=ids
    )
    return made


def _of_sentencepiece(file: Path, length: int, vocabulary: int | None) -> Tokenizer:
    """Opens SigLIP's tokenizer, whose texts are canonicalized; texts end with `</s>`."""
    try:
        import sentencepiece
    except ImportError as error:
        raise UserError("sentencepiece is not installed: pip install sentencepiece") from error
    try:
        made = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (OSError, RuntimeError) as error:
        raise UserError(f"{file} is damaged: {error}") from error
    _check_size(file, made.get_piece_size(), vocabulary)
    end = made.eos_id()

    def encode(texts: list[str]) -> list[tuple[list[int], bool]]:
        found = made.encode([canonical(text) for text in texts])
        return [([*tokens[: length - 1], end], len(tokens) >= length) for tokens in found]

    return Tokenizer(encode, length, end, made.get_piece_size())


def canonical(text: str) -> str:
    """Returns a text in lower case, without punctuation, with single spaces (SigLIP)."""
    return re.sub(r"\s+", " ", text.lower().translate(_NO_PUNCTUATION)).strip()
