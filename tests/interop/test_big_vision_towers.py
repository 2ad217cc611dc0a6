"""Both towers written as an npz file have big_vision's names and shapes."""

import math
import shutil
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import test_big_vision_text
from flax import nnx
from helpers import random_model
from test_big_vision_text import ARRAYS, FILE, IMAGES

import vit_jax
from vit_jax.errors import UserError
from vit_jax.models.image_text import ImageTextModel
from vit_jax.models.text import TextTower
from vit_jax.models.text_tokens import open_tokenizer
from vit_jax.options.text import TextOptions

tokenizer = test_big_vision_text.tokenizer
TEXTS = ("a cat", "Two DOGS", "", "the quick brown fox jumps over the lazy dog")
TEXT = dict(vocabulary=90, length=7, dim=24, depth=2, heads=3, mlp_dim=40, output_dim=16)
IMAGE = dict(patch_size=8, dim=16, depth=2, heads=2, mlp_dim=24, image_size=32)


def made(tokenizer, text=(), probabilities="sigmoid", num_classes=0, **image) -> ImageTextModel:
    """Returns a model with random parameters."""
    tower = random_model(
        "ViT-mu/16", **IMAGE | dict(num_classes=num_classes, pooling="map") | image
    )
    options = TextOptions(**TEXT | dict(text))
    bias = -7.5 if probabilities == "sigmoid" else None
    texts = open_tokenizer(tokenizer[0].parent, options.length, "big_vision")
    text_tower = TextTower(options, rngs=nnx.Rngs(0))
    return ImageTextModel(tower, text_tower, 2.25, bias, probabilities, texts)


def dense(name, *shape, outputs=1) -> dict:
    """Returns the shapes of a dense layer; its bias has the kernel's last `outputs` axes."""
    return {f"{name}/kernel": shape, f"{name}/bias": shape[-outputs:]}


def attention(name, dim, heads) -> dict:
    found = dense(f"{name}/out", heads, dim // heads, dim)
    for part in ("query", "key", "value"):
        found |= dense(f"{name}/{part}", dim, heads, dim // heads, outputs=2)
    return found


def norm(name, dim) -> dict:
    return {f"{name}/scale": (dim,), f"{name}/bias": (dim,)}


def mlp(name, dim, mlp_dim) -> dict:
    return dense(f"{name}/Dense_0", dim, mlp_dim) | dense(f"{name}/Dense_1", mlp_dim, dim)


def encoder(name, dim, depth, heads, mlp_dim) -> dict:
    found = norm(f"{name}/encoder_norm", dim)
    for layer in range(depth):
        block = f"{name}/encoderblock_{layer}"
        found |= norm(f"{block}/LayerNorm_0", dim) | norm(f"{block}/LayerNorm_1", dim)
        found |= attention(f"{block}/MultiHeadDotProductAttention_0", dim, heads)
        found |= mlp(f"{block}/MlpBlock_0", dim, mlp_dim)
    return found


def two_towers(image: dict, text: dict, biased: bool) -> dict:
    """Returns names and shapes of the parameters of big_vision's `two_towers`.

    If there is a class token, big_vision accepts tables with and without a position of the token.
    """
    sizes = [image[name] for name in ("dim", "depth", "heads", "mlp_dim")]
    dim, _, heads, mlp_dim = sizes
    patch, pooling = image["patch_size"], image["pooling"]
    found = dense("img/embedding", patch, patch, 3, dim) | encoder("img/Transformer", *sizes)
    if image["position"] == "1d":
        patches = math.prod(side // patch for side in image["image_size"])
        found["img/pos_embedding"] = (1, patches + (pooling == "cls"), dim)
    if pooling == "cls":
        found["img/cls"] = (1, 1, dim)
    if pooling == "map":
        found["img/MAPHead_0/probe"] = (1, 1, dim)
        found |= attention("img/MAPHead_0/MultiHeadDotProductAttention_0", dim, heads)
        found |= norm("img/MAPHead_0/LayerNorm_0", dim) | mlp(
            "img/MAPHead_0/MlpBlock_0", dim, mlp_dim
        )
    if image["pre_logits"]:
        found |= dense("img/pre_logits", dim, dim)
    if image["num_classes"]:
        found |= dense("img/head", dim, image["num_classes"])
    sizes = [text[name] for name in ("dim", "depth", "heads", "mlp_dim")]
    found |= encoder("txt/Encoder_0", *sizes) | dense("txt/head", sizes[0], text["output_dim"])
    found["txt/Embed_0/embedding"] = (text["vocabulary"], sizes[0])
    found["txt/pos_embedding"] = (1, text["length"], sizes[0])
    found |= {"t": (1,)} | ({"b": (1,)} if biased else {})
    return {f"params/{name}": tuple(shape) for name, shape in found.items()}


def test_reading_and_writing_a_big_vision_file_is_bit_exact(tokenizer, tmp_path):
    source, out = shutil.copytree(FILE.parent, tmp_path / "source"), tmp_path / "out.npz"
    shutil.copy(tokenizer[0], source)
    command = [sys.executable, "-m", "vit_jax.convert", source / FILE.name, out, "--to=big_vision"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith(
        "--to=big_vision writes both towers: add --tower=both"
    )
    command = [*command[:-1], "--tower=both"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("note:")] == [
        "note: not written: the tokenizer; copy spiece.model of the source into the folder of the "
        "npz file"
    ]
    assert done.stdout.splitlines()[-1].endswith(
        "out.npz for big_vision; read back, it is the same bit for bit"
    )
    written = np.load(out)
    assert set(written) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(written[name], array, strict=True)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(),
        dict(num_classes=20, text=dict(output_dim=20), probabilities="softmax"),
        dict(pooling="gap", position="sincos2d", pre_logits=True),
        dict(pooling="cls", num_classes=16),
        dict(image_size=(32, 16)),
    ],
    ids=lambda arguments: ",".join(arguments) or "siglip",
)
def test_a_written_model_has_big_visions_names_and_the_same_embeddings(
    arguments, tokenizer, tmp_path
):
    model, notes = made(tokenizer, **arguments), []
    written = vit_jax.save_model(model, tmp_path / "model.npz", log=notes.append)
    assert any("copy spiece.model of the source into the folder" in line for line in notes)
    arrays = dict(np.load(written))
    expected = two_towers(
        asdict(model.image.options), asdict(model.text.options), model.logit_bias is not None
    )
    assert {name: x.shape for name, x in arrays.items()} == expected
    with pytest.raises(UserError, match="there is no tokenizer in"):
        vit_jax.load_image_text(written, image_size=model.image.image_size, log=str)
    shutil.copy(tokenizer[0], tmp_path)
    read = vit_jax.load_image_text(written, image_size=model.image.image_size, log=str)
    np.testing.assert_array_equal(read.encode_text(TEXTS), model.encode_text(TEXTS))
    height, width = model.image.image_size
    images = IMAGES[:, :height, :width]
    np.testing.assert_array_equal(read.encode_image(images), model.encode_image(images))
    texts = model.encode_text(TEXTS)
    np.testing.assert_array_equal(
        read.logits(read.encode_image(images), texts),
        model.logits(model.encode_image(images), texts),
    )
    assert read.probabilities == model.probabilities


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(text=dict(causal=True)), "a text tower with causal=True for big_vision"),
        (dict(text=dict(pooling="end")), "a text tower with pooling='end' .* Supported: 'last'"),
        (dict(text=dict(gelu="quick")), "a text tower with gelu='quick' for big_vision"),
        (dict(text=dict(norm_epsilon=1e-5)), "a text tower with norm_epsilon=1e-05"),
        (dict(text=dict(head_bias=False)), "a text tower with head_bias=False"),
        (dict(pooling="cls_gap"), "an image tower with pooling='cls_gap' .* Supported: 'map', "),
        (dict(position="none"), "an image tower with position='none' for big_vision"),
        (dict(gelu="erf"), "^big_vision cannot store gelu=erf$"),
        (dict(pooling="cls", image_size=(32, 16)), "pooling='cls' and images of 32x16"),
    ],
)
def test_models_that_big_vision_lacks_are_rejected(arguments, words, tokenizer, tmp_path):
    model = made(tokenizer, **arguments)
    with pytest.raises(UserError, match=words):
        vit_jax.save_model(model, tmp_path / "model.npz", log=str)
    assert not list(tmp_path.iterdir())


def test_other_image_towers_and_tokenizers_are_rejected(tokenizer, tmp_path):
    model = made(tokenizer)
    for path, library in (("model.npz", "transformers"), ("model", "big_vision")):
        with pytest.raises(UserError, match="give FILE.npz for big_vision, or a new folder"):
            vit_jax.save_model(model, tmp_path / path, library=library, log=str)
    model.tokenizer.files = tuple(tmp_path / name for name in ("vocab.json", "merges.txt"))
    with pytest.raises(UserError, match="a tokenizer of vocab.json, merges.txt for big_vision"):
        vit_jax.save_model(model, tmp_path / "model.npz", log=str)
    model.tokenizer.files = ()
    with pytest.raises(UserError, match="big_vision has no tokenizer of UTF-8 bytes"):
        vit_jax.save_model(model, tmp_path / "model.npz", log=str)
    model = made(tokenizer)
    model.image = vit_jax.create_model("ConvNeXt-T", image_size=32, num_classes=16)
    with pytest.raises(UserError, match="a ConvNeXt as image tower for big_vision"):
        vit_jax.save_model(model, tmp_path / "model.npz", log=str)
    assert not list(tmp_path.iterdir())


def test_differences_of_preprocessing_and_cleaning_are_noted(tokenizer, tmp_path):
    model, notes = made(tokenizer), []
    model.tokenizer.cleaning = "siglip"
    vit_jax.save_model(model, tmp_path / "model.npz", log=notes.append)
    assert len(notes) == 3
    assert "preprocessing (short_side, 0.875 of the image, bilinear); for an npz file" in notes[1]
    assert "punctuation is not removed" in notes[2]
