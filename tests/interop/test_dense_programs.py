"""Exported segmenters and detectors equal the models; ONNX Runtime and JAX alone run them."""

import json

import jax
import numpy as np
import onnxruntime
import pytest
from flax import nnx

import vit_jax
from vit_jax.interop.programs import (
    Objects,
    dense_metadata_of,
    difference,
    outputs_of,
    write_onnx,
    write_stablehlo,
)
from vit_jax.models.dense import make_head
from vit_jax.models.dense.batch_norm import initial_statistics
from vit_jax.models.dense.depth import depth_head
from vit_jax.models.dense.depth_model import DepthModel
from vit_jax.models.dense.detector import Detector
from vit_jax.models.dense.detr import DetectionHead
from vit_jax.models.dense.segmenter import Segmenter
from vit_jax.options.objective import DepthOptions, SegmentationOptions

SHAPE = (32, 32, 3)
NAMES = ("sky", "road", "car")
IMAGES = np.random.default_rng(0).integers(256, size=(3, *SHAPE), dtype=np.uint8)


def backbone():
    return vit_jax.create_model("ViT-32x2/8", num_classes=0, image_size=32)


def pyramid():
    values = dict(blocks=(1, 1, 1, 1), widths=(8, 16, 24, 32))
    return vit_jax.create_model("ConvNeXt-T", num_classes=0, image_size=32, **values)


def segmenter_of(head):
    model = pyramid() if head == "upernet" else backbone()
    options = SegmentationOptions(head=head, queries=8, query_layers=1, dim=16)
    made = make_head(options, model, len(NAMES), rngs=nnx.Rngs(0))
    return Segmenter(model, made, NAMES, initial_statistics(made))


# EoMT has transposed convolutions, and UPerNet has pooling layers.
@pytest.mark.parametrize("head", ["linear", "eomt", "upernet"])
def test_onnx_computes_the_scores_of_a_segmenter(tmp_path, head):
    segmenter, file = segmenter_of(head), tmp_path / "m.onnx"
    metadata = dense_metadata_of(segmenter, IMAGES.dtype, None)
    write_onnx(segmenter, file, SHAPE, IMAGES.dtype, metadata, ("images", "scores"))
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["class_names"]) == [*NAMES]
    scores_of = jax.jit(lambda images: segmenter(images))
    for images in (IMAGES, IMAGES[:1]):
        (scores,) = session.run(["scores"], {"images": images})
        expected = np.asarray(scores_of(images))
        assert np.ptp(expected) > 1e-3
        np.testing.assert_allclose(scores, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("head", ["linear", "dpt"])
def test_onnx_computes_the_depth(tmp_path, head):
    model, file = backbone(), tmp_path / "m.onnx"
    made = depth_head(DepthOptions(head=head, dim=16), model, rngs=nnx.Rngs(0))
    depth = DepthModel(model, made, (), initial_statistics(made))
    write_onnx(depth, file, SHAPE, IMAGES.dtype, {}, ("images", "depth"))
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (metres,) = session.run(["depth"], {"images": IMAGES})
    assert np.ptp(metres) > 1e-3
    expected = jax.jit(lambda images: depth(images))(IMAGES)
    np.testing.assert_allclose(metres, expected, rtol=1e-4)


def load_stablehlo(file):
    return jax.export.deserialize(bytearray(file.read_bytes())).call


def of_onnx(write, **values):
    """Returns arguments that only the ONNX export accepts."""
    return values if write is write_onnx else {}


def load_onnx(file):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images})


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(
    ("write", "load"), [(write_stablehlo, load_stablehlo), (write_onnx, load_onnx)]
)
def test_programs_compute_the_objects_of_a_detector(tmp_path, write, load, masks):
    model, names = backbone(), ("images", "objects", "masks")[: 2 + masks]
    head = DetectionHead(model, 2, dim=16, queries=6, depth=1, masks=masks, rngs=nnx.Rngs(0))
    detector, file = Detector(model, head, NAMES[:2]), tmp_path / "m"
    write(Objects(detector), file, SHAPE, IMAGES.dtype, **of_onnx(write, names=names))
    program, detect = load(file), jax.jit(lambda images: detector(images))
    for images in (IMAGES, IMAGES[:1]):
        objects, *found = map(np.asarray, outputs_of(program(images)))
        expected = detect(images)
        np.testing.assert_allclose(objects[..., :4], expected.boxes, atol=1e-4)
        np.testing.assert_allclose(objects[..., 4], expected.scores, atol=1e-4)
        assert (objects[..., 5] == expected.classes).all()
        assert len(found) == masks
        if masks:
            scale = np.abs(expected.masks).max()
            np.testing.assert_allclose(found[0], expected.masks, atol=1e-4 * scale)


def test_the_difference_of_detections_ignores_the_order_of_objects():
    head = DetectionHead(model := backbone(), 2, dim=16, queries=6, depth=1, rngs=nnx.Rngs(0))
    detector = Objects(Detector(model, head, NAMES[:2]))
    objects = np.asarray(jax.jit(lambda images: detector(images))(IMAGES))

    def another(images):
        return objects[:, [1, 0, *range(2, objects.shape[1])]]

    def of_another_class(images):
        return objects + np.eye(6)[5]

    def moved(images):
        return objects + 0.01 * np.eye(6)[0]

    assert difference(detector, another, IMAGES) < 1e-6
    assert difference(detector, of_another_class, IMAGES) > 1e-3
    assert 1e-4 < difference(detector, moved, IMAGES) <= 0.0101


def test_the_difference_of_detections_includes_masks():
    model = backbone()
    head = DetectionHead(model, 2, dim=16, queries=6, depth=1, masks=True, rngs=nnx.Rngs(0))
    detector = Objects(Detector(model, head, NAMES[:2]))
    objects, masks = map(np.asarray, jax.jit(lambda images: detector(images))(IMAGES))

    def another(images):
        order = [1, 0, *range(2, objects.shape[1])]
        return objects[:, order], masks[:, order]

    def of_another_object(images):
        return objects, masks[:, ::-1]

    assert difference(detector, another, IMAGES) < 1e-6
    assert difference(detector, of_another_object, IMAGES) > 1e-3
