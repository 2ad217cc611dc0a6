"""Tokenizers of text towers: UTF-8 bytes, or the tokenizer files in a checkpoint's folder.

CLIP and SigLIP 2 have a `tokenizer.json`, which Hugging Face's `tokenizers` reads. CLIP also has
`vocab.json` and `merges.txt`. SigLIP has a `spiece.model`, which SentencePiece reads. Transformers,
big_vision and open_clip use the same files, but they clean the texts in different ways before the
texts are split into tokens.
"""

import hashlib
import html
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

# Tokenizer files, which are downloaded from the Hub in addition to the model's files.
TOKENIZER_FILES = (
    *("tokenizer.json", "spiece.model", "vocab.json", "merges.txt"),
    *("tokenizer_config.json", "special_tokens_map.json"),
)
OPEN_CLIP = "open_clip_config.json"  # Config of an open_clip model and its tokenizer.
BYTES = "bytes"  # Name of the tokenizer of UTF-8 bytes, which has no files.
_FILES = "tokenizer.json, spiece.model, or vocab.json and merges.txt"
_START, _END = "<|startoftext|>", "<|endoftext|>"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OPEN_CLIP_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_CLIP_WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)
_ASCII_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)

Clean = Callable[[str], str]  # Cleans a text before it is split into tokens.


class Tokenizer:
    """Converts texts to a fixed number of tokens; warns once if a text is truncated.

    Args:
      encode: called with a list of texts; returns a pair for each text. The first element is the
        text's tokens, at most `length` including special tokens. The second is True if the text
        was truncated.
      length: number of tokens of a text, including padding.
      padding: id of the token that fills up short texts.
      vocabulary: number of token ids.

    Attributes:
      files: the tokenizer's files.
      cleaning: how texts are cleaned: `open_clip`, or the argument `cleaning` of `open_tokenizer`.
    """

    files: tuple[Path, ...] = ()
    cleaning: str = ""

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
        """Id of the token that ends each text."""
        tokens = self.tokens_of("")
        return tokens[-1] if tokens else self.padding

    def tokens_of(self, text: str) -> list[int]:
        """Returns a text's tokens without padding."""
        ((tokens, _),) = self._encode([text])
        return list(tokens)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the token ids of texts, int32 `[texts, length]`.

        Raises:
          UserError: there are no texts, or a text is not a string.
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
    folder: Path, length: int, cleaning: str, vocabulary: int | None = None
) -> Tokenizer:
    """Opens the tokenizer in a checkpoint's folder.

    Args:
      folder: the folder with the tokenizer's files; `bytes` selects the tokenizer of UTF-8 bytes.
      length: number of tokens of a text.
      cleaning: how texts are cleaned before they are split into tokens. `clip`: as tokenizer.json
        prescribes. `siglip`: as in Transformers, which converts texts to lower case and, for
        spiece.model, removes punctuation. `big_vision`: converts ASCII letters to lower case. If
        the folder has an `open_clip_config.json`, this file prescribes the cleaning instead.
      vocabulary: number of token embeddings of the text tower; None: not checked.

    Raises:
      UserError: there is no tokenizer, it is damaged, its library is not installed, or it has more
        tokens than the text tower has embeddings.
    """
    if str(folder) == BYTES:
        return _of_bytes(length)
    if (config := open_clip_config(folder)) is not None:
        cleaning = "open_clip"
        made = _of_open_clip(folder, length, config, vocabulary)
    elif (folder / "spiece.model").is_file():
        clean = canonical if cleaning == "siglip" else _CLEANINGS[cleaning]
        made = _of_sentencepiece(folder / "spiece.model", length, clean, vocabulary)
    elif (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file():
        made = _of_tokenizers(folder, length, _CLEANINGS[cleaning], vocabulary)
    else:
        raise _no_tokenizer(folder)
    made.files, made.cleaning = tokenizer_files(folder), cleaning
    return made


def _no_tokenizer(folder: Path) -> UserError:
    return UserError(
        f"there is no tokenizer in {folder} ({_FILES}): copy it from the checkpoint's page"
    )


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """Returns the files in a folder that determine the tokens of a text; () for `bytes`."""
    names = TOKENIZER_FILES + (() if open_clip_config(folder) is None else (OPEN_CLIP,))
    return tuple(folder / name for name in names if (folder / name).is_file())


def tokenizer_identity(folder: Path) -> str:
    """Returns a hash of a tokenizer's files; for `bytes`, which has no files, its name."""
    files = tokenizer_files(folder)
    made_of = hashlib.blake2b(digest_size=8)
    for file in files:
        made_of.update(file.name.encode() + b"\0" + file.read_bytes())
    return made_of.hexdigest() if files else str(folder)


def open_clip_config(folder: Path) -> dict[str, Any] | None:
    """Returns the content of the `open_clip_config.json` in a folder.

    Returns:
      None if the folder does not have this file, or if the folder also contains the model in
      Transformers' format, which takes precedence.

    Raises:
      UserError: the file is damaged.
    """
    if not (folder / OPEN_CLIP).is_file():
        return None
    weights = ("model.safetensors", "model.safetensors.index.json")
    if is_of_transformers(folder) and any((folder / name).is_file() for name in weights):
        return None
    return _read_json(folder / OPEN_CLIP)


def is_of_transformers(folder: Path) -> bool:
    """Returns True if the `config.json` in a folder is that of Transformers' CLIP or SigLIP."""
    return _read_json(folder / "config.json").get("model_type") in ("clip", "siglip")


def _read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; {} if the file is missing or does not contain an object.

    Raises:
      UserError: the file is not valid JSON.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(read_small(file))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def _of_bytes(length: int) -> Tokenizer:
    """Returns the tokenizer of UTF-8 bytes.

    Id 0 is padding, id 1 is the end token, and id b + 2 is the byte b.
    """

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
    """Returns the special tokens in a tokenizer's JSON files, such as `pad_token`."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _read_json(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def _of_tokenizers(folder: Path, length: int, clean: Clean, vocabulary: int | None) -> Tokenizer:
    """Opens `tokenizer.json`, or `vocab.json` and `merges.txt`, with Hugging Face's tokenizers."""
    with_json = (folder / "tokenizer.json").is_file()
    file = folder / ("tokenizer.json" if with_json else "vocab.json")
    made = _opened(file, _from_json if with_json else _clip_tokenizer)
    special = _special_tokens(folder)
    default = "" if with_json else _END  # As in Transformers' CLIPTokenizer.
    padding = special.get("pad_token") or special.get("eos_token") or default
    if (pad := made.token_to_id(padding)) is None:
        raise UserError(
            f"the padding token {padding!r} of {folder} is not in its vocabulary: add pad_token to "
            "tokenizer_config.json"
        )
    return _with_tokenizers(made, file, length, pad, clean, vocabulary)


def _from_json(tokenizers: Any, folder: Path) -> Any:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def _opened(file: Path, make: Callable[[Any, Path], Any]) -> Any:
    """Returns `make(tokenizers, file.parent)`, where `tokenizers` is Hugging Face's library.

    Raises:
      UserError: the file is damaged, or the library is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("tokenizers is not installed: pip install tokenizers") from error
    try:
        return make(tokenizers, file.parent)
    except UserError:
        raise
    except Exception as error:  # The library raises plain exceptions.
        raise UserError(f"{file} is damaged: {error}") from error


def _with_tokenizers(
    made: Any, file: Path, length: int, padding: int, clean: Clean, vocabulary: int | None
) -> Tokenizer:
    """Returns a `Tokenizer` that uses a tokenizer of Hugging Face's library."""
    # The number of ids is computed from the largest id, because some ids may be unused.
    tokens = 1 + max(made.get_vocab().values(), default=-1)
    _check_size(file, tokens, vocabulary)
    made.no_padding()
    made.enable_truncation(length)

    def encode(texts: list[str]) -> list[tuple[list[int], bool]]:
        found = made.encode_batch([clean(text) for text in texts])
        return [(one.ids, bool(one.overflowing)) for one in found]

    return Tokenizer(encode, length, padding, tokens)


def _clip_tokenizer(tokenizers: Any, folder: Path) -> Any:
    """Returns a CLIP model's byte-pair tokenizer from the tokenizer's vocabulary and merges."""
    normalizers = tokenizers.normalizers
    spaces = normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    model = tokenizers.models.BPE.from_file(
        str(folder / "vocab.json"),
        str(folder / "merges.txt"),
        continuing_subword_prefix="",
        end_of_word_suffix="</w>",
        unk_token=_END,
    )
    made = _byte_pairs(tokenizers, model, _CLIP_WORDS, _START, _END)
    made.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    return made


def _byte_pairs(tokenizers: Any, model: Any, words: str, start: str, end: str) -> Any:
    """Returns a byte-pair tokenizer that adds a start token and an end token to each text.

    The regular expression `words` splits texts into words.
    """
    made = tokenizers.Tokenizer(model)
    pre_tokenizers = tokenizers.pre_tokenizers
    split = pre_tokenizers.Split(tokenizers.Regex(words), behavior="removed", invert=True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.add_special_tokens([start, end])
    ids = [(name, made.token_to_id(name)) for name in (start, end)]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=ids
    )
    return made


def _of_open_clip(
    folder: Path, length: int, config: dict[str, Any], vocabulary: int | None
) -> Tokenizer:
    """Opens the tokenizer as open_clip does: CLIP's byte pairs, or a tokenizer named in the config.

    Raises:
      UserError: the tokenizer is unsupported, missing or damaged.
    """
    text = (config.get("model_cfg") or {}).get("text_cfg") or {}
    named = bool(text.get("hf_tokenizer_name"))
    clean = _open_clip_cleaning(text, "whitespace" if named else "lower")
    files = [folder / name for name in ("tokenizer.json", "vocab.json", "spiece.model")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise _no_tokenizer(folder)
    if file.name == "spiece.model":
        return _of_sentencepiece(file, length, clean, vocabulary)
    if named:
        return _of_tokenizers(folder, length, clean, vocabulary)
    made = _opened(file, _open_clip_tokenizer)
    return _with_tokenizers(made, file, length, 0, clean, vocabulary)


def _open_clip_cleaning(text: dict[str, Any], default: str) -> Clean:
    """Returns the function that cleans texts as `text_cfg` in open_clip's config prescribes.

    `default` is the name of the function if `text`, the content of `text_cfg`, has none.

    Raises:
      UserError: the cleaning is unsupported, or ftfy is not installed.
    """
    try:
        import ftfy
    except ImportError as error:
        raise UserError(
            "ftfy is not installed, with which open_clip cleans texts: pip install ftfy"
        ) from error
    arguments = dict(text.get("tokenizer_kwargs") or {})
    name = arguments.pop("clean", None) or default
    others = {key: text.get(key) for key in ("tokenizer_mode", "tokenizer_type")} | arguments
    for key, value in others.items():
        if value:
            raise UserError(f"Unsupported: a tokenizer of open_clip with {key}={value!r}")
    if name not in _OPEN_CLIP_CLEANINGS:
        raise UserError(
            f"Unsupported: a tokenizer of open_clip with clean={name!r}. Supported: "
            f"{', '.join(_OPEN_CLIP_CLEANINGS)}."
        )
    finish = _OPEN_CLIP_CLEANINGS[name]

    def clean(text: str) -> str:
        return finish(" ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split()))

    return clean


# open_clip's cleaning functions. Their inputs are texts whose wrong encodings, HTML entities and
# repeated spaces have already been corrected.
_OPEN_CLIP_CLEANINGS: dict[str, Clean] = {
    "lower": str.lower,
    "whitespace": str,
    "whitespace_underscore": lambda text: " ".join(text.replace("_", " ").split()),
    "canonicalize": lambda text: canonical(text.replace("_", " ")),
}


def _open_clip_tokenizer(tokenizers: Any, folder: Path) -> Any:
    """Returns open_clip's byte-pair tokenizer from the vocabulary and merges of CLIP's files.

    In open_clip the special tokens are `<start_of_text>` and `<end_of_text>`; in Transformers they
    are `<|startoftext|>` and `<|endoftext|>`.
    """
    model = _read_json(folder / "tokenizer.json").get("model")
    if model is None:
        vocabulary, merges = tokenizers.models.BPE.read_file(
            str(folder / "vocab.json"), str(folder / "merges.txt")
        )
    else:
        merges = [tuple(x.split(" ") if isinstance(x, str) else x) for x in model["merges"]]
        vocabulary = model["vocab"]
    start, end = "<start_of_text>", "<end_of_text>"
    if missing := {_START, _END} - vocabulary.keys():
        raise UserError(
            f"the tokenizer in {folder} is not CLIP's, which open_clip_config.json requires: it "
            f"lacks {min(missing)}"
        )
    renamed = {{_START: start, _END: end}.get(name, name): id for name, id in vocabulary.items()}
    pairs = tokenizers.models.BPE(
        renamed, merges, continuing_subword_prefix="", end_of_word_suffix="</w>", unk_token=end
    )
    return _byte_pairs(tokenizers, pairs, _OPEN_CLIP_WORDS, start, end)


def _of_sentencepiece(file: Path, length: int, clean: Clean, vocabulary: int | None) -> Tokenizer:
    """Opens SigLIP's `spiece.model`; each text gets the end token `</s>`."""
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
    # SigLIP pads with the end token, SigLIP 2 with Gemma's padding token.
    padding = end if made.bos_id() < 0 else made.pad_id()

    def encode(texts: list[str]) -> list[tuple[list[int], bool]]:
        found = made.encode([clean(text) for text in texts])
        return [([*tokens[: length - 1], end], len(tokens) >= length) for tokens in found]

    return Tokenizer(encode, length, padding, made.get_piece_size())


def canonical(text: str) -> str:
    """Returns a text in lower case, without punctuation and repeated spaces, as SigLIP does."""
    return re.sub(r"\s+", " ", text.lower().translate(_NO_PUNCTUATION)).strip()


_CLEANINGS: dict[str, Clean] = {
    "clip": str,
    "siglip": str.lower,
    "big_vision": lambda text: text.translate(_ASCII_LOWER),
}
