"""Both towers written for Transformers are bit-exact, and Transformers can read them."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import test_image_text
from flax import nnx
from PIL import Image
from safetensors.numpy import load_file
from test_image_text import KINDS, TEXTS, config_from, their_tokens

import vit_jax
from vit_jax.errors import UserError
from vit_jax.models.image_text import ImageTextModel
from vit_jax.models.text import TextTower
from vit_jax.models.text_tokens import open_tokenizer

ROOT = Path(__file__).parents[2]
models, photograph = test_image_text.models, test_image_text.photograph
# Config values that do not affect the embeddings.
UNREAD = ("bos_token_id", "pad_token_id", "projection_dim", "dtype", "_name_or_path")


def assert_same_files(written, source):
    """Asserts that tensors and tokenizer files are equal."""
    found, expected = (load_file(folder / "model.safetensors") for folder in (written, source))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
    for name in ("tokenizer.json", "spiece.model", "vocab.json", "merges.txt"):
        if (source / name).is_file():
            assert (written / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_transformers_is_bit_exact_after_writing_and_read_by_the_library(
    kind,
    torch,
    transformers,
    models,
    photograph,
    tmp_path,
):
    folder, theirs, _, processor = models[kind]
    model = vit_jax.load_image_text(folder, log=str)
    notes = []
    written = vit_jax.save_model(model, tmp_path / "written", log=notes.append)
    assert not notes
    assert_same_files(written, folder)
    read = transformers.AutoModel.from_pretrained(written).double().eval()
    assert type(read) is type(theirs)
    config, expected = (
        transformers.AutoConfig.from_pretrained(each).to_dict() for each in (written, folder)
    )
    for part in ("text_config", "vision_config"):
        for name, value in expected[part].items():
            if name not in UNREAD:
                assert config[part][name] == value, name
    tokens, expected = (
        their_tokens(transformers.AutoTokenizer.from_pretrained(each), TEXTS)
        for each in (written, folder)
    )
    np.testing.assert_array_equal(tokens, expected)
    image = Image.open(photograph)
    read_processor = transformers.AutoProcessor.from_pretrained(written)
    pixels = read_processor.image_processor(image, return_tensors="pt")["pixel_values"]
    expected = processor(image, return_tensors="pt")["pixel_values"]
    np.testing.assert_array_equal(pixels, expected)
    inputs = dict(input_ids=torch.from_numpy(tokens), pixel_values=pixels.double())
    with torch.no_grad():
        logits, expected = (each(**inputs).logits_per_image for each in (read, theirs))
    np.testing.assert_array_equal(logits, expected)


def test_the_command_writes_a_run_with_its_tokenizer(torch, transformers, models, tmp_path):
    """A trained run of a CLIP has a bias in its projection, which CLIP in Transformers lacks."""
    config = config_from("clip", models["clip"][0])
    config.optimizer.learning_rate, config.steps = 0.05, 2
    images = np.random.default_rng(0).integers(256, size=(4, 32, 32, 3)).astype(np.uint8)
    pairs = images, ["a cat", "two dogs", "it's naïve", "猫"]
    vit_jax.train(config, tmp_path / "run", train=pairs, test=pairs)
    trained = vit_jax.load_image_text(tmp_path / "run", log=str)
    assert np.any(trained.image.head.bias[...])
    done = subprocess.run(
        [sys.executable, "-m", "vit_jax.convert", tmp_path / "run", tmp_path / "out"]
        + ["--tower=both"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "text tower: 2 layers of width 32" in done.stdout
    assert "note: head/bias is added to norm/bias" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("read back, it is the same bit for bit")
    read = transformers.CLIPModel.from_pretrained(tmp_path / "out").eval()
    tokens = their_tokens(transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), TEXTS)
    pixels = torch.from_numpy(np.array(trained.image.normalize(images))).permute(0, 3, 1, 2)
    with torch.no_grad():
        out = read(input_ids=torch.from_numpy(tokens), pixel_values=pixels)
    np.testing.assert_allclose(trained.encode_text(TEXTS), out.text_embeds, atol=1e-5)
    np.testing.assert_allclose(trained.encode_image(images), out.image_embeds, atol=1e-5)


@pytest.mark.parametrize("length", [12, 32])
def test_a_text_tower_of_another_length_than_its_tokenizer_has_the_right_tokens(
    length, torch, transformers, models, tmp_path
):
    """The tokenizer's own files have the length 20."""
    folder, loaded = models["siglip"][0], vit_jax.load_image_text(models["siglip"][0], log=str)
    options = replace(loaded.text.options, length=length)
    model = ImageTextModel(
        loaded.image,
        TextTower(options, rngs=nnx.Rngs(0)),
        *(1.0, -1.5, "sigmoid"),
        open_tokenizer(folder, length, "siglip"),
    )
    vit_jax.save_model(model, tmp_path / "written", log=str)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "written")
    found = tokenizer(list(TEXTS), padding="max_length", truncation=True, return_tensors="np")
    np.testing.assert_array_equal(found["input_ids"], model.tokenizer(TEXTS))


# Allows child processes to import the image processors of Transformers on this machine: see
# `tests.conftest.name_missing_operators`.
OPERATORS = """
import torch
from tests.conftest import name_missing_operators
name_missing_operators(torch)
"""


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_both_towers_are_published_with_code_that_was_run(
    kind, torch, transformers, tmp_path, models
):
    config = config_from(kind, models[kind][0])
    config.steps = 2
    images = np.random.default_rng(0).integers(256, size=(4, 32, 32, 3)).astype(np.uint8)
    pairs = images, ["a cat", "two dogs", "it's naïve", "猫"]
    vit_jax.train(config, tmp_path / "run", train=pairs, test=pairs)
    (tmp_path / "sitecustomize.py").write_text(OPERATORS)
    command = [sys.executable, "-m", "vit_jax.push", tmp_path / "run", "ada/pairs"]
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
    done = subprocess.run(
        [*command, "--licence=mit", f"--dry_run={tmp_path / 'out'}"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "both towers, since it is a run of images and texts" in done.stdout
    for library in ("Transformers", "vit_jax"):  # Each computes the probabilities of the texts.
        assert f"ran the card's lines for {library}: " in done.stdout, done.stdout
    card = (tmp_path / "out" / "README.md").read_text()
    assert "pipeline_tag: zero-shot-image-classification" in card
    assert "| text tower | 2 layers of width 32" in card and "| test recall@1 " in card
    published = vit_jax.load_image_text(tmp_path / "out", log=str)
    trained = vit_jax.load_image_text(tmp_path / "run", log=str)
    np.testing.assert_allclose(published.encode_text(TEXTS), trained.encode_text(TEXTS), atol=1e-5)


def test_a_clip_of_transformers_is_written_for_open_clip(torch, open_clip, models, tmp_path):
    """The CLIP has its own vocabulary, which open_clip reads with Transformers' tokenizers."""
    folder, out = models["clip"][0], tmp_path / "out"
    command = [sys.executable, "-m", "vit_jax.convert", folder, out, "--to=open_clip"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith(
        "--to=open_clip writes both towers: add --tower=both"
    )
    done = subprocess.run([*command, "--tower=both"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "note: before an upload, replace OWNER/NAME in open_clip_config.json" in done.stdout
    assert f"wrote {out} for open_clip; read back, it is the same bit for bit" in done.stdout
    read, _ = open_clip.create_model_from_pretrained(f"local-dir:{out}")
    model, texts = vit_jax.load_image_text(folder, log=str), ["two dogs", "a cat"]
    tokens = open_clip.get_tokenizer(f"local-dir:{out}")(texts)
    images = np.random.default_rng(0).integers(256, size=(2, 32, 32, 3)).astype(np.uint8)
    pixels = torch.from_numpy(np.array(model.image.normalize(images))).permute(0, 3, 1, 2)
    with torch.no_grad():
        image, text, scale = read.eval()(pixels, tokens)
    np.testing.assert_allclose(model.encode_text(texts), text, atol=1e-5)
    np.testing.assert_allclose(model.encode_image(images), image, atol=1e-5)
    assert float(scale) == pytest.approx(float(np.exp(model.logit_scale[...])), rel=1e-5)


def test_models_that_transformers_lacks_are_rejected(models, tmp_path):
    model = vit_jax.load_image_text(models["siglip"][0], log=str)
    model.probabilities = "softmax"
    with pytest.raises(UserError, match="has no probabilities='softmax'"):
        vit_jax.save_model(model, tmp_path / "x", log=str)
    model = vit_jax.load_image_text(models["siglip"][0], log=str)
    with pytest.raises(UserError, match="both towers for library='timm'. Supported: 'transf"):
        vit_jax.save_model(model, tmp_path / "x", library="timm", log=str)
    with pytest.raises(UserError, match="image_size: arguments are changed only where"):
        vit_jax.save_model(model, tmp_path / "x", image_size=16, log=str)
    model.tokenizer.files = ()
    with pytest.raises(UserError, match="Transformers has no tokenizer of UTF-8 bytes"):
        vit_jax.save_model(model, tmp_path / "x", log=str)
    other = vit_jax.load_image_text(models["clip"][0], log=str)
    other.image = vit_jax.create_model("ViT-mu/16", image_size=32, num_classes=24)
    with pytest.raises(UserError, match="text tower of CLIP and an image tower of type vit"):
        vit_jax.save_model(other, tmp_path / "x", log=str)
    assert not list(tmp_path.iterdir())


def test_a_missing_tokenizer_configuration_is_written(models, tmp_path):
    """A SigLIP with only `spiece.model` has a tokenizer without a configuration."""
    folder = shutil.copytree(models["siglip"][0], tmp_path / "bare")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"):
        (folder / name).unlink(missing_ok=True)
    model = vit_jax.load_image_text(folder, log=str)
    written = vit_jax.save_model(model, tmp_path / "written", log=str)
    config = json.loads((written / "tokenizer_config.json").read_text())
    assert config == dict(
        tokenizer_class="SiglipTokenizer", model_max_length=20, model_input_names=["input_ids"]
    )


@pytest.mark.parametrize("suffix", ["onnx", "stablehlo"])
@pytest.mark.parametrize("kind", KINDS)
def test_exported_towers_compute_the_embeddings(kind, suffix, models, photograph, tmp_path):
    """Each tower is a separate program, for tokens or for images."""
    folder, *_ = models[kind]
    model = vit_jax.load_image_text(folder, log=str)
    tokens = model.tokenizer(TEXTS)
    images = np.random.default_rng(0).integers(256, size=(2, 32, 32, 3)).astype(np.uint8)
    expected = {"text": model.encode_text(TEXTS), "image": model.encode_image(images)}
    inputs = {"text": tokens, "image": images}
    for tower, flag in (("text", []), ("image", ["--uint8"])):
        file = tmp_path / f"{tower}.{suffix}"
        command = [sys.executable, "-m", "vit_jax.export", folder, file, f"--tower={tower}", *flag]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        facts, found = run_program(file, inputs[tower])
        np.testing.assert_allclose(found, expected[tower], atol=2e-5)
        assert facts["probabilities"] == model.probabilities
        scale = float(facts["logit_scale"]), float(facts["logit_bias"])
        bias = 0.0 if model.logit_bias is None else float(model.logit_bias[...])
        assert scale == (float(model.logit_scale[...]), bias)


def run_program(file, inputs) -> tuple[dict, np.ndarray]:
    """Runs a program; returns its metadata and its outputs."""
    if file.suffix == ".onnx":
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        (name,) = (each.name for each in session.get_inputs())
        return session.get_modelmeta().custom_metadata_map, session.run(None, {name: inputs})[0]
    import jax

    program = jax.export.deserialize(bytearray(file.read_bytes()))
    return json.loads(file.with_name(f"{file.name}.json").read_text()), program.call(inputs)
