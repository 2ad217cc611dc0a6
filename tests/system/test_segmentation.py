"""A segmentation run is loaded, and used on images of any size."""

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.shapes import NAMES, draw, segmentation_run
from vit_jax.evaluation.dense_metrics import confusion, segmentation_metrics

__all__ = ["segmentation_run"]  # A fixture.


@pytest.fixture(scope="module")
def segmenter(segmentation_run):
    return vit_jax.load_segmenter(segmentation_run[0], log=str)


@pytest.fixture(scope="module")
def drawn():
    """The test images with their masks."""
    return [draw(index) for index in range(1000, 1012)]


def metrics_of(predicted, masks):
    pairs = zip(predicted, masks, strict=True)
    return segmentation_metrics(sum(confusion(*pair, len(NAMES)) for pair in pairs))


def test_a_loaded_segmenter_predicts_masks_of_the_images_size(segmentation_run, segmenter, drawn):
    images, masks = zip(*drawn, strict=True)
    predicted = segmenter.predict(list(images))
    assert segmenter.class_names == NAMES
    assert all(found.dtype == np.uint8 for found in predicted)
    assert [found.shape for found in predicted] == [mask.shape for mask in masks]
    # The run's evaluation squeezes each image into a window.
    of_run = segmentation_run[1]["miou"]
    assert metrics_of(predicted, masks).miou > max(0.6, of_run)
    assert metrics_of(segmenter.predict(list(images), whole=True), masks).miou > 0.5


def test_the_result_does_not_depend_on_the_other_images(segmenter, drawn):
    (image, _), *others = drawn
    together = segmenter.predict([image, *(other for other, _ in others)])
    assert (segmenter.predict(image)[0] == together[0]).all()


def test_changed_parameters_are_used(segmentation_run, drawn):
    segmenter = vit_jax.load_segmenter(f"{segmentation_run[0]}@40", log=str)
    image = drawn[0][0]
    assert (segmenter.predict(image)[0] != 2).any()
    bias = segmenter.head.classifier.bias
    bias[...] = bias[...].at[2].set(1e6)
    assert (segmenter.predict(image)[0] == 2).all()


def test_windows_may_have_another_size(segmentation_run, drawn):
    segmenter = vit_jax.load_segmenter(segmentation_run[0], image_size=64, log=str)
    assert segmenter(np.zeros((1, 64, 64, 3), np.uint8)).shape == (1, 8, 8, 3)
    image, mask = drawn[0]
    assert segmenter.predict(image)[0].shape == mask.shape


def test_a_damaged_file_is_named(segmenter, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    Image.fromarray(draw(0)[0]).save(tmp_path / "b.png")
    with pytest.raises(vit_jax.UserError, match=r"cannot read .*a\.png: not one of the formats"):
        segmenter.predict([tmp_path / "b.png", tmp_path / "a.png"])


def test_a_checkpoint_without_a_head_is_rejected(tmp_path):
    model = vit_jax.create_model("ViT-Ti/16", num_classes=0, image_size=32, depth=1)
    vit_jax.save_model(model, tmp_path / "model")
    with pytest.raises(vit_jax.UserError, match="has no segmentation head: give the workdir of"):
        vit_jax.load_segmenter(tmp_path / "model", log=str)
