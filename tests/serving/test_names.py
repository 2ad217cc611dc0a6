"""Class names in requests to the server of an image-text model."""

import base64
import io
import json
import logging
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import vit_jax
from tests.serving import test_service
from tests.serving.test_service import JSON, ask
from vit_jax.classifier import Classifier
from vit_jax.data.preprocess import TestCrop
from vit_jax.models.image_text import ImageTextModel
from vit_jax.models.text import TextTower
from vit_jax.models.text_tokens import open_tokenizer
from vit_jax.options.text import TextOptions
from vit_jax.serving import names as names_module
from vit_jax.serving.engine import ClassifierEngine, make_engine
from vit_jax.serving.names import Names

OWN = ["cat", "dog"]
TEMPLATES = ("a {}", "a photo of a {}")


@pytest.fixture(scope="module")
def model():
    values = dict(image_size=16, num_classes=0, dim=32, depth=1, heads=2, mlp_dim=64)
    image = vit_jax.create_model("ViT-Ti/16", **values)
    sizes = dict(dim=32, depth=1, heads=2, mlp_dim=64, output_dim=32)
    tower = TextTower(TextOptions(vocabulary=258, length=24, **sizes), rngs=nnx.Rngs(1))
    return ImageTextModel(
        image, tower, 3.0, None, "softmax", open_tokenizer(Path("bytes"), 24, "clip")
    )


@pytest.fixture(scope="module")
def engine(model):
    classifier = model.classifier(OWN, TEMPLATES)
    names = Names(model, TEMPLATES, np.asarray(classifier.classes[...]))
    opened = Classifier(classifier, OWN, TestCrop(16, resize=16), "softmax", model)
    return ClassifierEngine(opened, 2, 5, None, names)


@pytest.fixture
def asked(engine, monkeypatch):
    """Returns a function that sends a request to a server of the model."""
    monkeypatch.setattr(test_service, "ENGINE", engine)
    return ask


def drawn(seed: int = 0) -> bytes:
    held = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(256, size=(16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(held, "PNG")
    return held.getvalue()


def body(names, images=1) -> bytes:
    pictures = [base64.b64encode(drawn(seed)).decode() for seed in range(images)]
    return json.dumps({"images": pictures, "names": names}).encode()


def expected(model, seed: int, names) -> dict[str, float]:
    image = np.asarray(Image.open(io.BytesIO(drawn(seed))))[None]
    classes = model.classifier(names, TEMPLATES).classes[...]
    logits = model.logits(model.encode_image(image), classes)[0]
    return dict(zip(names, np.asarray(jax.nn.softmax(logits)).tolist(), strict=True))


def predictions(result) -> dict[str, float]:
    return {each["class"]: each["probability"] for each in result["predictions"]}


def test_names_of_a_request_are_its_classes(engine, model):
    names = ["a red car", "猫", "dog"]
    classes = engine.names.embeddings(engine.names.checked(names))
    images = [np.asarray(Image.open(io.BytesIO(drawn(seed)))) for seed in (0, 1)]
    # A batch may contain images of requests with different names.
    (first, order), (second, own) = engine.compute(images, [classes, None])
    found = {names[label]: x for label, x in zip(order.tolist(), first.tolist(), strict=True)}
    assert found == pytest.approx(expected(model, 0, names), rel=1e-4)
    found = {OWN[label]: x for label, x in zip(own.tolist(), second.tolist(), strict=True)}
    assert found == pytest.approx(expected(model, 1, OWN), rel=1e-4)
    assert first.tolist() == sorted(first.tolist(), reverse=True)


@pytest.mark.parametrize(("top", "listed"), [(None, 5), (20, 12)])
def test_a_request_can_have_more_names_than_the_server(model, top, listed):
    names = [f"name {number}" for number in range(12)]
    opened = Classifier(
        model.classifier(OWN, TEMPLATES), OWN, TestCrop(16, resize=16), "softmax", model
    )
    engine = make_engine(opened, batch_size=2, top=top, threshold=None, templates=TEMPLATES)
    image = np.asarray(Image.open(io.BytesIO(drawn())))
    ((probabilities, _),) = engine.compute([image], [engine.names.embeddings(names)])
    assert len(probabilities) == listed


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("cat,dog", "names must be a list of texts"),
        (["cat", 3], "names must be a list of texts"),
        ([], "class names are empty"),
        (["cat", " "], "class names are empty"),
        (["cat"], "'cat' is the only class name"),
        (["cat", "cat "], "class names 'cat' and 'cat' have the same tokens"),
        (
            ["photographed animal: a", "photographed animal: b"],
            "have the same tokens in 'a {}', of which the text tower reads 24: give one, or a sho",
        ),
        (["cat", "x" * 101], "a name may have 100 characters, and 'xx.* has 101"),
        (["cat", "a\nb"], "a character that cannot be printed"),
        ([f"name {number}" for number in range(101)], "may have 100 names, and this one has 101"),
    ],
)
def test_invalid_names_are_one_line(names, words, asked):
    status, _, text = asked("/predict", body(names), kind=JSON)
    assert status == 400
    assert "\n" not in text
    with pytest.raises(ValueError, match=words):
        raise ValueError(json.loads(text)["error"])


def test_names_in_an_address_are_one_parameter(asked):
    status, _, text = asked("/predict", drawn(), query=b"names=owl&names=fox,dog")
    assert status == 400
    assert json.loads(text)["error"].startswith("'names' is there twice: give it once")


def test_a_server_without_a_text_tower_has_no_names():
    status, _, text = ask("/predict", body(OWN), kind=JSON)
    assert status == 400
    assert "started without --names" in text


def test_embeddings_of_names_are_cached_up_to_a_limit(model, monkeypatch):
    monkeypatch.setattr(names_module, "MOST_CACHED", 3)
    names, encoded = Names(model, ("{}",), np.zeros((2, 32), np.float32)), []
    encode = names._encode
    monkeypatch.setattr(names, "_encode", lambda texts: encoded.extend(texts) or encode(texts))
    first = names.embeddings(("a", "b"))
    np.testing.assert_array_equal(names.embeddings(("b", "a")), first[::-1])
    assert encoded == ["a", "b"]
    names.embeddings(("c", "d", "a"))  # "b" was used least recently.
    assert encoded == ["a", "b", "c", "d"]
    names.embeddings(("a", "b"))
    assert encoded == ["a", "b", "c", "d", "b"]
    assert len(names._cached) == 3
    # These are more names than fit into the cache.
    assert names.embeddings(tuple("efghi")).shape == (5, 32)


def test_nothing_is_compiled_for_new_names(engine, caplog):
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        engine.names.embeddings(tuple(f"new {number}" for number in range(70)))
        engine.names.embeddings(("another",))
    assert not [line for line in caplog.messages if line.startswith("Compiling")]
