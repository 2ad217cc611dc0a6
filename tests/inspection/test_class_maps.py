"""Tests of class maps drawn as images."""

import numpy as np

from vit_jax.inspection.class_maps import overlay, palette_image
from vit_jax.models.dense.palette import voc_palette


def test_the_palette_is_that_of_pascal_voc():
    palette = voc_palette()
    published = {0: (0, 0, 0), 1: (128, 0, 0), 2: (0, 128, 0), 8: (64, 0, 0), 15: (192, 128, 128)}
    published |= {20: (0, 64, 128), 255: (224, 224, 192)}
    assert {label: tuple(palette[label].tolist()) for label in published} == published
    assert len(np.unique(palette, axis=0)) == 256


def test_pixels_of_a_palette_image_are_classes(tmp_path):
    mask = np.arange(256, dtype=np.uint8).reshape(16, 16)
    palette_image(mask).save(tmp_path / "mask.png")
    from PIL import Image

    read = Image.open(tmp_path / "mask.png")
    assert read.mode == "P" and (np.asarray(read) == mask).all()
    assert (np.asarray(read.convert("RGB")) == voc_palette()[mask]).all()


def test_class_0_is_not_coloured():
    image = np.full((1, 2, 3), 100, np.uint8)
    found = overlay(image, np.array([[0, 1]], np.uint8))
    assert found[0].tolist() == [[100, 100, 100], [117, 40, 40]]
