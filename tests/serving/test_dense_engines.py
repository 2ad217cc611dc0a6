"""Servers of segmenters and detectors return the same results as `predict`."""

import base64
import io
import json

import numpy as np
import pytest
from flax import nnx
from PIL import Image

import vit_jax
from tests.serving import test_service
from tests.serving.test_service import ask
from tests.shapes import NAMES, draw
from vit_jax.data.preprocess import TestCrop
from vit_jax.dense import DetectionPredictor, SegmentationPredictor
from vit_jax.models.dense.batch_norm import initial_statistics
from vit_jax.models.dense.detector import Detections, Detector
from vit_jax.models.dense.detr import DetectionHead
from vit_jax.models.dense.linear import LinearHead
from vit_jax.models.dense.palette import class_legend
from vit_jax.models.dense.segmenter import Segmenter
from vit_jax.object_files import overlay as draw_objects
from vit_jax.serving.dense_engines import DetectorEngine, SegmenterEngine
from vit_jax.serving.engine import Asked


def encoded(image):
    held = io.BytesIO()
    Image.fromarray(image).save(held, "PNG")
    return held.getvalue()


def picture(address):
    return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))


def answers(engine, images, **asked):
    """Returns the responses for the images of one batch."""
    decoded = [engine.decode(encoded(image)) for image in images]
    results = engine.compute(decoded)
    pairs = zip(decoded, results, strict=True)
    answers = [engine.answer(*pair, Asked([], **asked)) for pair in pairs]
    return json.loads(json.dumps(answers))


@pytest.fixture(scope="module")
def segmenter():
    """Returns a segmenter that classifies each patch by its random features."""
    model = vit_jax.create_model("ViT-32x2/8", num_classes=0, image_size=32)
    head = LinearHead(model, len(NAMES), rngs=nnx.Rngs(0))
    segmenter = Segmenter(model, head, NAMES, initial_statistics(head))
    segmenter.predictor = SegmentationPredictor(TestCrop(32, "fit", 32))
    return segmenter


def test_masks_are_those_of_predict(segmenter):
    engine = SegmenterEngine(segmenter, segmenter.predictor.crop, 4)
    images = [draw(1000)[0], draw(1001)[0], np.tile(draw(1002)[0], (1, 4, 1))]
    for image, answer in zip(images, answers(engine, images), strict=True):
        mask = Image.open(io.BytesIO(base64.b64decode(answer["mask"])))
        (expected,) = segmenter.predict(image)
        assert mask.mode == "P" and (np.asarray(mask) == expected).all()
        for row in answer["classes"]:
            assert row["class"] == NAMES[row["label"]]
            assert row["share"] == pytest.approx((expected == row["label"]).mean())
        assert sum(row["share"] for row in answer["classes"]) == pytest.approx(1)


def test_the_overlay_has_colours_where_the_mask_has_classes(segmenter, monkeypatch):
    engine = SegmenterEngine(segmenter, segmenter.predictor.crop, 1)
    (answer,) = answers(engine, [draw(1000)[0]], seen=True, overlay=True)
    seen, overlay = (np.asarray(picture(answer[name]), int) for name in ("seen", "overlay"))
    assert seen.shape == overlay.shape and min(seen.shape[:2]) == 32
    coloured = 1 - sum(row["share"] for row in answer["classes"] if row["label"] == 0)
    assert (seen != overlay).any(-1).mean() == pytest.approx(coloured, abs=0.05)
    monkeypatch.setattr(test_service, "ENGINE", engine)
    status, _, text = ask("/predict", encoded(draw(0)[0]), query=b"heat=1")
    assert status == 400 and "'heat' is an unknown parameter; supported: overlay, seen" in text


@pytest.mark.parametrize("masks", [False, True])
def test_objects_are_those_of_predict_in_pixels_of_the_image(masks):
    model = vit_jax.create_model("ViT-32x2/8", num_classes=0, image_size=32)
    head = DetectionHead(model, 2, dim=16, queries=6, depth=1, masks=masks, rngs=nnx.Rngs(0))
    detector = Detector(model, head, ("block", "ball"))
    detector.predictor = DetectionPredictor(TestCrop(32, "fit", 32))
    engine = DetectorEngine(detector, detector.predictor.crop, 2, 0.005)
    image = draw(5)[0]
    (answer,) = answers(engine, [image], overlay=True)
    (expected,) = detector.predict(image, threshold=0.005)
    assert len(answer["objects"]) == len(expected.scores) > 0
    boxes = np.array([row["box"] for row in answer["objects"]])
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    np.testing.assert_allclose(corners, expected.corners, atol=1e-3)
    scores = [row["score"] for row in answer["objects"]]
    np.testing.assert_allclose(scores, expected.scores, atol=1e-5)
    named = [detector.class_names[label] for label in expected.labels]
    assert [row["class"] for row in answer["objects"]] == named
    if masks:
        run_lengths = pytest.importorskip("pycocotools.mask")
        found = [
            run_lengths.decode(run_lengths.frPyObjects(row["segmentation"], *image.shape[:2]))
            for row in answer["objects"]
        ]
        np.testing.assert_array_equal(found, expected.masks)
        assert 0 < expected.masks.mean() < 1
    width, height = picture(answer["overlay"]).size  # The overlay lacks the padding of the crop.
    assert max(width, height) == 1024  # The overlay is enlarged so that names are readable.
    assert width / height == pytest.approx(image.shape[1] / image.shape[0], rel=0.05)


def test_boxes_of_many_classes_have_colours():
    names = [str(label) for label in range(300)]
    found = Detections(np.array([[2.0, 2, 20, 20]]), np.array([299]), np.ones(1))
    drawn = np.asarray(draw_objects(np.zeros((32, 32, 3), np.uint8), found, names))
    assert drawn.any()
    assert class_legend([299], names, background=False).keys() == {"299"}
