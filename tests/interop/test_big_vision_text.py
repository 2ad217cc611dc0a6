"""Embeddings of both towers of big_vision's files equal those of big_vision's models."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vit_jax
from vit_jax.classifier import open_classifier
from vit_jax.errors import UserError
from vit_jax.interop.image_text import values_of_towers
from vit_jax.models.text import tokenizer_of
from vit_jax.options.objective import ContrastiveOptions

GOLDEN = Path(__file__).parent / "golden"
FILE = GOLDEN / "big_vision_siglip/model.npz"
ARRAYS = dict(np.load(FILE))
RESULTS = dict(np.load(FILE.parent / "results.npz"))
IMAGES = np.load(GOLDEN / "images.npy")
CORPUS = (
    "a photo of a cat on a mat",
    "two dogs run along the beach at night",
    "naïve café owners don't sell 12 cups",
    "the quick brown fox jumps over the lazy dog",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Trains a `spiece.model` with SigLIP's special tokens.

    Returns the file, and the processor of SentencePiece that reads it.
    """
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "corpus.txt").write_text("\n".join(CORPUS * 4))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "spiece"),
        vocab_size=90,
        hard_vocab_limit=False,
        **dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1),
    )
    file = folder / "spiece.model"
    return file, sentencepiece.SentencePieceProcessor(model_file=str(file))


def checkpoint(folder, tokenizer, arrays=ARRAYS) -> Path:
    """Writes a file with both towers next to a tokenizer."""
    shutil.copy(tokenizer[0], folder)
    np.savez(folder / "siglip.npz", **arrays)
    return folder / "siglip.npz"


def without_prefix(arrays: dict) -> dict:
    return {name.removeprefix("params/"): x for name, x in arrays.items()}


def old_optimizer(arrays: dict) -> dict:
    return {name.replace("params/", "opt/target/", 1): x for name, x in arrays.items()}


def positions_twice(arrays: dict) -> dict:
    """Splits the position table into two tables that are added, as in early files of big_vision."""
    half = arrays["params/txt/pos_embedding"] / 2
    more = {"params/txt/pos_embedding": half, "params/txt/Encoder_0/pos_embedding": half}
    return arrays | more


def scanned(arrays: dict) -> dict:
    """Stacks all layers in one array, as big_vision does with `scan=True`."""
    found, layers = {}, "params/txt/Encoder_0/encoderblock_"
    for name, x in arrays.items():
        if not name.startswith(layers):
            found[name] = x
        elif name.startswith(layers + "0/"):
            rest = name.removeprefix(layers + "0")
            stack = np.stack([arrays[f"{layers}{layer}{rest}"] for layer in range(3)])
            found[layers.removesuffix("_") + rest] = stack
    return found


@pytest.mark.parametrize(
    "form",
    [dict, without_prefix, old_optimizer, positions_twice, scanned],
    ids=lambda f: f.__name__,
)
def test_embeddings_and_scores_are_big_visions(form, tokenizer, tmp_path):
    model = vit_jax.load_image_text(checkpoint(tmp_path, tokenizer, form(ARRAYS)), log=str)
    texts = np.asarray(model.text(RESULTS["tokens"]))
    texts = texts / np.linalg.norm(texts, axis=-1, keepdims=True)
    np.testing.assert_allclose(texts, RESULTS["texts"], atol=2e-6)
    images = model.encode_image(IMAGES)
    np.testing.assert_allclose(images, RESULTS["images"], atol=2e-6)
    np.testing.assert_allclose(model.logits(images, texts), RESULTS["scores"], atol=1e-5)
    assert model.probabilities == "sigmoid"


def test_texts_are_cleaned_and_padded_as_in_big_vision(tokenizer, tmp_path):
    """big_vision lower-cases only ASCII letters, and does not remove punctuation."""
    model = vit_jax.load_image_text(checkpoint(tmp_path, tokenizer), log=str)
    processor = tokenizer[1]
    texts = {"A Cat!": "a cat!", "": "", "CAFÉ": "cafÉ", "the quick brown fox jumps": None}
    ours = model.tokenizer(list(texts))
    for row, (text, cleaned) in zip(ours, texts.items(), strict=True):
        tokens = processor.encode(text if cleaned is None else cleaned)[:5]
        np.testing.assert_array_equal(row, tokens + [1] * (6 - len(tokens)))


def test_a_run_that_continues_a_file_has_its_tokens(tokenizer, tmp_path):
    file = checkpoint(tmp_path, tokenizer)
    texts = ["A Cat! it's", "CAFÉ"]
    run = tokenizer_of(ContrastiveOptions(**values_of_towers(file)))
    np.testing.assert_array_equal(
        run(texts), vit_jax.load_image_text(file, log=str).tokenizer(texts)
    )


def test_images_are_squeezed_and_classified_by_names(tokenizer, tmp_path):
    file = checkpoint(tmp_path, tokenizer)
    pixels = np.random.default_rng(0).integers(256, size=(32, 32, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    model = vit_jax.load_image_text(file, log=str)
    names, templates = ("cat", "dog"), ("{}",)  # The text tower reads only six tokens.
    (found,) = vit_jax.zero_shot(model, tmp_path / "image.png", names, templates=templates)
    images = model.encode_image(pixels[None])
    texts = model.encode_text(names)
    expected = 1 / (1 + np.exp(-np.asarray(model.logits(images, texts))[0]))
    np.testing.assert_allclose(sorted(found.probabilities), sorted(expected), atol=1e-6)
    classifier = open_classifier(str(file), names="cat,dog", templates=templates, log=str)
    assert (classifier.crop.kind, classifier.crop.resize) == ("square", 32)
    assert classifier.probabilities == "sigmoid"


def test_a_model_without_a_bias_has_probabilities_over_the_names(tokenizer, tmp_path):
    arrays = {name: x for name, x in ARRAYS.items() if name != "params/b"}
    model = vit_jax.load_image_text(checkpoint(tmp_path, tokenizer, arrays), log=str)
    assert model.probabilities == "softmax" and model.logit_bias is None


def renamed(old: str, new: str) -> dict:
    return {name.replace(old, new): x for name, x in ARRAYS.items()}


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (
            renamed("/txt/", "/other/"),
            "siglip.npz: .* has no text tower: there are no arrays called txt/",
        ),
        (renamed("txt/Embed_0/", "txt/BertModel_0/"), "such as the BERT of LiT"),
        (renamed("txt/head/", "txt/other/"), r"without a projection .* \(there is no txt/head"),
        (renamed("encoderblock_1/LayerNorm_0", "encoderblock_1/other"), "lacks .*encoderblock_1"),
        ({name: x for name, x in ARRAYS.items() if name != "params/t"}, "lacks params/t"),
    ],
)
def test_other_text_towers_are_rejected(arrays, words, tokenizer, tmp_path):
    file = checkpoint(tmp_path, tokenizer, arrays)
    with pytest.raises(UserError, match=words):
        vit_jax.load_image_text(file, log=str)


def search(file, text) -> subprocess.CompletedProcess:
    """Runs a text search on the images in the file's folder."""
    command = [sys.executable, "-m", "vit_jax.search", f"--checkpoint={file}", text, file.parent]
    cache = os.environ | {"XDG_CACHE_HOME": str(file.parent)}
    return subprocess.run(command, capture_output=True, text=True, env=cache)


@pytest.mark.slow
def test_messages_about_long_or_empty_texts_are_one_line(tokenizer, tmp_path):
    file = checkpoint(tmp_path, tokenizer)
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / "image.png")
    done = search(file, "the quick brown fox jumps")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "warning: a text is truncated to the tower's 6 tokens: 'the quick brown fox jumps' ..."
    ]
    done = search(file, "\u200b")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        r"error: the text '\u200b' has no tokens: give one, such as 'a dog on a beach'"
    ]


def test_a_file_without_a_tokenizer_is_rejected(tmp_path):
    shutil.copy(FILE, tmp_path / "model.npz")
    with pytest.raises(UserError, match="there is no tokenizer in"):
        vit_jax.load_image_text(tmp_path / "model.npz", log=str)
