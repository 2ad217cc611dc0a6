"""Photographs composed of cut-outs, with masks, as the experiment segment_photos reads them."""

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.ledger.cut_outs import compose_all

COLOURS = {"red": (250, 10, 10), "blue": (10, 10, 250)}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Returns folders of cut-outs (discs of two colours) and of grey backgrounds."""
    folder = tmp_path_factory.mktemp("parts")
    y, x = np.mgrid[:60, :60] - 29.5
    alpha = np.where(x**2 + y**2 < 28**2, 255, 0)
    for name, colour in COLOURS.items():
        (folder / "stamps" / name).mkdir(parents=True)
        for number in range(6):
            pixels = np.dstack([*(np.full((60, 60), c) for c in colour), alpha]).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "stamps" / name / f"{number}.png")
    (folder / "grounds").mkdir()
    for number in range(3):
        grey = np.full((400, 500, 3), 100 + 20 * number, np.uint8)
        Image.fromarray(grey).save(folder / "grounds" / f"{number}.png")
    return folder


def test_masks_are_of_the_cut_outs(parts, tmp_path):
    out = tmp_path / "photos"
    counts = {"train": 6, "test": 3}
    compose_all(parts / "stamps", tuple(COLOURS), parts / "grounds", out, counts)
    for split, count in counts.items():
        source = open_source("masks", split, path=str(out), labels=False, fields=("mask",))
        assert source.class_names == ("background", "red", "blue")
        assert len(source) == count
        for index in range(count):
            file = out / "images" / split / f"{index:05d}.jpg"
            image = np.asarray(Image.open(file)).astype(int)
            mask = source.fields_of(index)["mask"]
            coloured = np.abs(image - image.mean(-1, keepdims=True)).max(-1) > 40
            assert np.mean(coloured == (mask > 0)) > 0.98
            for label, channel in ((1, 0), (2, 2)):
                if (own := mask == label).any():
                    assert image[own].mean(0).argmax() == channel


def test_objects_are_the_visible_parts_of_the_masks(parts, tmp_path):
    pytest.importorskip("pycocotools")
    out = tmp_path / "photos"
    compose_all(parts / "stamps", tuple(COLOURS), parts / "grounds", out, {"train": 6, "test": 1})
    of_masks = open_source("masks", "train", path=str(out), labels=False, fields=("mask",))
    fields = dict(labels=False, fields=("boxes", "instances"))
    source = open_source("coco", "train", path=str(out), **fields)
    assert source.class_names == ("red", "blue")
    for index in range(len(source)):
        boxes, mask = source.fields_of(index)["instances"], of_masks.fields_of(index)["mask"]
        shown = np.zeros_like(mask)
        for (left, top, right, bottom), label, pixels in zip(*boxes[:3], strict=True):
            assert not shown[pixels].any() and pixels.any()
            shown[pixels] = label + 1
            rows, columns = np.nonzero(pixels)
            assert (left, top) == (columns.min(), rows.min())
            assert (right, bottom) == (columns.max() + 1, rows.max() + 1)
        np.testing.assert_array_equal(shown, mask)


def test_splits_share_no_background(parts, tmp_path):
    out = tmp_path / "photos"
    compose_all(parts / "stamps", tuple(COLOURS), parts / "grounds", out, {"train": 8, "test": 8})
    greys = {}
    for split in ("train", "test"):
        images = [np.asarray(Image.open(x)) for x in (out / "images" / split).iterdir()]
        masks = [np.asarray(Image.open(x)) for x in sorted((out / "masks" / split).iterdir())]
        assert len(images) == len(masks) == 8
        greys[split] = {round(float(np.median(image)) / 20) for image in images}
    assert not greys["train"] & greys["test"]


def test_too_few_cut_outs_are_one_line(parts, tmp_path):
    (tmp_path / "few").mkdir()
    with pytest.raises(UserError, match="few has 0 images, and must have 3 or more"):
        compose_all(tmp_path, ("few",), parts / "grounds", tmp_path / "out", {"train": 1})
