"""Boxes and masks of TFDS data sets that were stored by TFDS."""

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.data.prepared import png, prepare
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError

BBox = tfds.features.BBox
MASK = np.array([[0, 1], [2, 3], [255, 1]], np.uint8)[..., None]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    objects = [
        {"bbox": BBox(0.25, 0.1, 0.5, 0.6), "label": 3},
        {"bbox": BBox(0.0, 0.0, 1.0, 1.0), "label": 19},
        {"bbox": BBox(0.5, 0.2, 0.5, 0.6), "label": 1},  # Without area.
    ]
    rest = {"is_difficult": False, "is_truncated": False, "pose": 0}
    image = np.zeros((40, 20, 3), np.uint8)
    prepare(
        "voc/2007",
        folder,
        {"train": 2, "test": 1, "validation": 1},
        lambda number: {
            "image": png(image),
            "objects": [one | rest for one in objects] if number != 1 else [],
        },
    )
    masked = {"image": png(np.zeros((3, 2, 3), np.uint8)), "segmentation_mask": png(MASK)}
    prepare("oxford_iiit_pet", folder, {"train": 1, "test": 1}, lambda number: masked)
    return folder


def test_boxes_are_in_pixels(data_dir):
    source = open_source("tfds", "train", path=f"voc/2007:{data_dir}", fields=("boxes",))
    boxes = source.fields_of(0)["boxes"]
    np.testing.assert_allclose(boxes.corners, [[2, 10, 12, 20], [0, 0, 20, 40]], rtol=1e-6)
    assert boxes.labels.tolist() == [3, 19] and not boxes.crowd.any()
    assert source.class_names[3] == "boat" and source[0].labels == ()
    assert source.fields_of(1)["boxes"].corners.shape == (0, 4)


def test_masks_are_of_one_channel(data_dir):
    path = f"oxford_iiit_pet:{data_dir}"
    source = open_source("tfds", "train", path=path, fields=("mask",), num_classes=4)
    np.testing.assert_array_equal(source.fields_of(0)["mask"], MASK[..., 0])
    few = open_source("tfds", "train", path=path, fields=("mask",), num_classes=3)
    with pytest.raises(UserError, match=r"example 0: 3 \(1 pixels\) beyond the 3 classes"):
        few.fields_of(0)
    with pytest.raises(UserError, match=r"no class names: give --config.data.num_classes"):
        open_source("tfds", "train", path=path, fields=("mask",))


def test_data_set_without_the_field_is_refused(data_dir):
    with pytest.raises(UserError, match="must have one image of one channel, and has none"):
        open_source("tfds", "train", path=f"voc/2007:{data_dir}", fields=("mask",), num_classes=2)
    with pytest.raises(UserError, match="must have one sequence with bbox and label"):
        open_source("tfds", "train", path=f"oxford_iiit_pet:{data_dir}", fields=("boxes",))


def test_chosen_classes_are_refused(data_dir):
    with pytest.raises(UserError, match="data.classes is unsupported with the boxes and masks"):
        open_source("tfds", "train", path=f"voc/2007:{data_dir}", fields=("boxes",), only=["boat"])
