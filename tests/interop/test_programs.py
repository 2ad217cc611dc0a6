"""Metadata of exported programs contain the preprocessing and the class names.

With them, a server without this package can prepare images and name classes.
"""

import json

import numpy as np
import onnxruntime
import pytest
from PIL import Image

import vit_jax
from vit_jax.data.preprocess import TestCrop
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.interop.programs import metadata_file, metadata_of, write_onnx, write_stablehlo

NAMES = ("cat", "dög", "bird, small")
VALUES = dict(dim=16, depth=1, mlp_dim=32, heads=2, image_size=32, patch_size=8, num_classes=3)
STATISTICS = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))

# Values stored as plain texts; ONNX files store the others as JSON.
TEXTS = {
    "input_dtype",
    "input_layout",
    "channels",
    "resize",
    "crop",
    "interpolation",
    "normalization",
}
TEXTS |= {"probabilities"}


@pytest.fixture(scope="module", params=["short_side", "square"])
def model(request, tmp_path_factory):
    """Returns a model read from a timm checkpoint with class names, for each kind of crop."""
    fresh = vit_jax.create_model("ViT-Ti/16", **VALUES, **STATISTICS)
    rng = np.random.default_rng(0)
    fresh.head.kernel[...] = rng.normal(size=fresh.head.kernel.shape).astype(np.float32)
    fresh.about.class_names = NAMES
    fresh.about.preprocessing = Preprocessing(request.param, 0.8, "bicubic", mode="exact")
    folder = tmp_path_factory.mktemp("checkpoint") / "timm"
    vit_jax.save_model(fresh, folder, library="timm", log=str)
    return vit_jax.load_model(folder, log=str)


def prepared(image: Image.Image, facts: dict) -> np.ndarray:
    """Prepares an image with Pillow alone, as the metadata describe it."""
    height, width = facts["image_size"]
    if facts["resize"] == "square":
        rows, columns = facts["resize_to"]
    elif facts["resize"] == "cover":
        least = zip(facts["resize_to"], image.size[::-1], strict=True)
        scale = max(side / whole for side, whole in least)
        columns, rows = (round(side * scale) for side in image.size)
    else:
        scale = facts["resize_to"] / min(image.size)
        columns, rows = (int(side * scale) for side in image.size)
    assert facts["antialias"] and facts["crop"] == "center" and facts["channels"] == "RGB"
    resized = image.resize(
        (columns, rows), getattr(Image.Resampling, facts["interpolation"].upper())
    )
    left, top = round((columns - width) / 2), round((rows - height) / 2)
    pixels = np.asarray(resized.crop((left, top, left + width, top + height)))
    low, high = facts["input_range"]
    return (
        (pixels / 255 * (high - low) + low)
        .round(6 if high == 1 else 0)
        .astype(facts["input_dtype"])[None]
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_onnx_metadata_have_the_preprocessing_and_the_classes(model, tmp_path, dtype):
    facts = metadata_of(model, np.dtype(dtype), model.about.preprocessing)
    write_onnx(model, tmp_path / "m.onnx", (32, 32, 3), np.dtype(dtype), facts)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    texts = session.get_modelmeta().custom_metadata_map
    assert (
        texts["Image.NominalPixelRange"]
        == {
            np.uint8: "NominalRange_0_255",
            np.float32: "Normalized_1_1",
        }[dtype]
    )
    read = {
        name: text if name in TEXTS else json.loads(text)
        for name, text in texts.items()
        if not name.startswith("Image.")
    }
    assert read["mean"] == [*STATISTICS["mean"]] and read["std"] == [*STATISTICS["std"]]
    image = Image.fromarray(
        np.random.default_rng(1).integers(256, size=(60, 90, 3), dtype=np.uint8)
    )
    (logits,) = session.run(None, {"images": prepared(image, read)})
    chances = np.exp(logits[0]) / np.exp(logits[0]).sum()
    (expected,) = model.predict(image, top=3)
    order = np.argsort(-chances)
    assert [read["class_names"][k] for k in order] == [*expected.classes]
    np.testing.assert_allclose(chances[order], expected.probabilities, atol=1e-4)


@pytest.mark.parametrize("shape", [(60, 90), (90, 60)])
@pytest.mark.parametrize("kind", ["short_side", "square"])
def test_metadata_describe_crops_that_are_not_square(kind, shape):
    seen = Preprocessing(kind, 0.8, "bicubic", mode="exact")
    model = vit_jax.create_model("ViT-Ti/16", **VALUES | dict(image_size=(32, 48)))
    facts = metadata_of(model, np.dtype(np.uint8), seen)
    pixels = np.random.default_rng(0).integers(256, size=(*shape, 3), dtype=np.uint8)
    crop = TestCrop((32, 48), kind, seen.resize((32, 48)), seen.mode, seen.interpolation)
    np.testing.assert_array_equal(prepared(Image.fromarray(pixels), facts)[0], crop(pixels))


def test_stablehlo_metadata_are_in_a_file_next_to_the_program(model, tmp_path):
    facts = metadata_of(model, np.dtype(np.uint8), model.about.preprocessing)
    write_stablehlo(model, tmp_path / "m.stablehlo", (32, 32, 3), np.dtype(np.uint8), facts)
    assert metadata_file(tmp_path / "m.stablehlo").name == "m.stablehlo.json"
    read = json.loads((tmp_path / "m.stablehlo.json").read_text(encoding="utf-8"))
    assert read == facts and read["class_names"] == [*NAMES] and read["preprocessing_known"]


def test_default_preprocessing_is_marked_as_unknown():
    model = vit_jax.create_model("ViT-Ti/16", **VALUES | dict(num_classes=0, channels=1))
    facts = metadata_of(model, np.dtype(np.float32), None)
    assert not facts["preprocessing_known"] and facts["resize_to"] == 36 and not facts["antialias"]
    assert facts["mean"] == facts["std"] == [0.5] and facts["channels"] == "grey"
    assert "class_names" not in facts and "probabilities" not in facts
