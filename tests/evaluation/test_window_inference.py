"""Tests of class maps of images of any size."""

import io

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from vit_jax import create_model
from vit_jax.data.decode import Unreadable
from vit_jax.data.image_files import ImageFiles
from vit_jax.data.preprocess import TestCrop
from vit_jax.evaluation.window_inference import WINDOWS, WindowInference
from vit_jax.models.dense.segmenter import Segmenter
from vit_jax.parallel.mesh import make_mesh

CROP = TestCrop(32, "fit", 32, "exact", "area")


class Brightness(nnx.Module):
    """A head that scores four classes by the mean brightness of each square of 8 pixels."""

    def __call__(self, model, images, rngs=None, state=None):
        x = images.astype(jnp.float32).mean(axis=-1)
        return x.reshape(len(x), 4, 8, 4, 8).mean(axis=(2, 4))

    def scores(self, outputs):
        return -jnp.abs(outputs[..., None] - jnp.arange(4) * 80)


def reject(index, error):
    raise error


@pytest.fixture(scope="module")
def inference():
    model = create_model("ViT-Ti/16", image_size=32, num_classes=0, depth=1)
    segmenter = Segmenter(model, Brightness(), "abcd")
    compute = WindowInference(segmenter, make_mesh(), CROP)

    def masks(images, on_unreadable=reject):
        files = ImageFiles([(str(index), image) for index, image in enumerate(images)])
        return compute(segmenter, files, on_unreadable)

    masks.compute = compute
    return masks


def stripes(height, width, pixels):
    """Returns vertical stripes of four levels, and the index of each pixel's level."""
    levels = np.arange(width) // pixels % 4
    labels = np.broadcast_to(levels, (height, width))
    return np.repeat(80 * labels[..., None], 3, axis=-1).astype(np.uint8), labels


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def test_class_maps_have_the_size_of_their_images(inference):
    drawn = [stripes(64, 64, 32), stripes(32, 300, 50), stripes(300, 40, 20), stripes(3, 4, 1)]
    found = [*inference([png(image) for image, _ in drawn])]
    assert [index for index, _ in found] == [0, 1, 2, 3]
    for (_, labels), (_, mask) in zip(drawn, found, strict=True):
        assert mask.shape == labels.shape and mask.dtype == np.uint8
        # Pixels next to an edge have a value between two levels.
        assert (mask == labels).mean() > 0.75
    middle = found[1][1][16, 25::50]
    assert middle.tolist() == [0, 1, 2, 3, 0, 1]


def test_windows_of_several_images_are_computed_together_and_compiled_once(inference):
    images = [stripes(20 + 3 * index, 90 - index, 30)[0] for index in range(WINDOWS + 3)]
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        scores = inference.compute._scores
        patch.setattr(inference.compute, "_scores", lambda *args: calls.append(1) or scores(*args))
        together = [mask for _, mask in inference(images)]
    assert len(calls) < len(images)
    assert scores._cache_size() == 1
    for image, mask in zip(images, together, strict=True):
        ((_, alone),) = inference([image])
        assert (alone == mask).all()


def test_unreadable_images_are_passed_to_the_handler_or_raised(inference):
    image, failed = stripes(40, 40, 20)[0], []
    found = inference([image, b"no image", image], lambda index, error: failed.append(index))
    assert [index for index, _ in found] == [0, 2] and failed == [1]
    with pytest.raises(Unreadable, match="formats"):
        [*inference([b"no image"])]


def test_no_images_have_no_class_maps(inference):
    assert [*inference([])] == []
