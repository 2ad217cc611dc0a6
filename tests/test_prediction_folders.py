"""Folders of predicted masks, depth maps and objects, after a second prediction overwrites them."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.image_files import find_images
from vit_jax.depth_files import write_depths
from vit_jax.mask_files import write_masks
from vit_jax.models.dense.detector import Detections
from vit_jax.object_files import write_objects

NOTHING = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32))


def model(value):
    """Returns a model with the same prediction for each image."""
    return SimpleNamespace(
        stream=lambda images, skip, **_: ((index, value) for index in range(len(images))),
        class_names=("sky", "road"),
        head=SimpleNamespace(range=(0.1, 10.0)),
    )


def masks(folder, images):
    write_masks(folder, model(np.ones((8, 8), np.uint8)), images, print, lambda *_: None)


def depths(folder, images):
    write_depths(folder, model(np.ones((8, 8), np.float32)), images, print, lambda *_: None)


def objects(folder, images):
    write_objects(folder, model(NOTHING), images, 0.3, print, lambda *_: None)


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "photos" / "more").mkdir(parents=True)
    for name in ("a.jpg", "b.jpg", "b.png", "more/c.jpg"):
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name)
    return tmp_path / "photos"


@pytest.mark.parametrize("write", [masks, depths, objects])
def test_a_second_prediction_leaves_no_files_of_the_first(write, photos, tmp_path):
    out, alone = tmp_path / "out", tmp_path / "alone"
    write(out, find_images([str(photos)]))
    one = find_images([str(photos / "a.jpg")])
    write(out, one)
    write(alone, one)
    names = [sorted(p.relative_to(f) for p in f.rglob("*") if p.is_file()) for f in (out, alone)]
    assert names[0] == names[1] and len(names[0]) == 3


@pytest.mark.parametrize("write", [masks, depths, objects])
def test_files_that_no_prediction_wrote_are_kept(write, photos, tmp_path):
    own = [tmp_path / "out" / name for name in ("masks/x.png", "depth/x.png", "overlays/y.jpg")]
    for file in own:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"the user's")
    write(tmp_path / "out", find_images([str(photos)]))
    assert all(file.read_bytes() == b"the user's" for file in own)
