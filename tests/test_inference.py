"""Predictions in Python: errors, memory, and the number of compilations of repeated calls."""

import gc
import weakref

import numpy as np
import pytest
from PIL import Image

import vit_jax
from vit_jax import inference
from vit_jax.errors import UserError


@pytest.fixture(scope="module", params=[3, 5], ids=["RGB", "five channels"])
def model(request, tmp_path_factory):
    """Returns a small model, loaded from a file."""
    folder = tmp_path_factory.mktemp("model")
    made = vit_jax.create_model(
        "ViT-mu/16", image_size=32, num_classes=7, channels=request.param, seed=0
    )
    vit_jax.save_model(made, folder / "timm", library="timm")
    return vit_jax.load_model(folder / "timm", log=str)


def images(model, count):
    pixels = np.random.default_rng(count).integers(256, size=(count, 32, 32, model.channels))
    return list(pixels.astype(np.uint8))


def test_images_are_not_kept_after_their_prediction(model):
    given = images(model, 2)
    kept = [weakref.ref(image) for image in given]
    assert len(model.predict(given)) == 2
    del given
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_the_same_number_of_classes_is_compiled_once(model, monkeypatch):
    asked, likeliest = [], inference.likeliest
    monkeypatch.setattr(
        inference, "likeliest", lambda top, kind: asked.append(top) or likeliest(top, kind)
    )
    for _ in range(3):
        model.predict(images(model, 2), top=2)
    assert asked == [2]


def test_no_images_raise_an_error(model):
    with pytest.raises(UserError, match="empty|no images|at least one"):
        model.predict([])


def test_unreadable_images_are_named_with_the_reason_after_smaller_calls_too(tmp_path):
    made = vit_jax.create_model("ViT-mu/16", image_size=32, num_classes=7, seed=0)
    vit_jax.save_model(made, tmp_path / "timm", library="timm")
    model = vit_jax.load_model(tmp_path / "timm", log=str)
    Image.new("RGB", (40, 30)).save(tmp_path / "0.png")
    files = [tmp_path / f"{number}.jpg" for number in range(4)]
    for file in files:
        Image.new("RGB", (400, 300), (200, 9, 9)).save(file, quality=95)
    assert len(model.predict(files[:3])) == 3
    for file in files:
        file.write_bytes(file.read_bytes()[:-400])
    with pytest.raises(UserError, match=r"^cannot read .*0\.jpg: .*truncated"):
        model.predict(files)
