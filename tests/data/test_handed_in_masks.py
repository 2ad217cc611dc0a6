"""Images and masks that a program passes in memory."""

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.sources import open_handed_in
from vit_jax.errors import UserError

IMAGES = np.zeros((4, 6, 5, 3), np.uint8)
MASKS = np.resize(np.array([0, 1, 2, 255], np.uint8), (4, 6, 5))


def opened(train, split="train", **options):
    return open_handed_in({"train": train}, split, labels=False, fields=("mask",), **options)


class Torch:
    """A data set of another library, with a length and items."""

    def __init__(self, *items):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __getitem__(self, index):
        return self._items[index]


def palette(mask: np.ndarray) -> Image.Image:
    image = Image.fromarray(mask, "P")
    image.putpalette([0] * 768)
    return image


@pytest.mark.parametrize(
    "data",
    [
        (IMAGES, MASKS),
        ([*IMAGES], [*MASKS]),
        (IMAGES, MASKS[..., None].astype(np.int64)),
        Torch(*zip(map(Image.fromarray, IMAGES), map(palette, MASKS), strict=True)),
        Torch(*({"image": i, "annotation": m} for i, m in zip(IMAGES, MASKS, strict=True))),
    ],
    ids=["arrays", "lists", "channel", "pil", "mappings"],
)
def test_masks_of_every_form_are_read(data):
    source = opened(data)
    assert source.class_names == ("0", "1", "2") and source.fields == ("mask",)
    for index in range(4):
        np.testing.assert_array_equal(source.fields_of(index)["mask"], MASKS[index])
        assert source[index].image.shape == (6, 5, 3) and source[index].labels == ()


def test_tensors_are_read():
    torch = pytest.importorskip("torch")
    source = opened(Torch(*((torch.zeros(3, 6, 5), torch.tensor(mask)[None]) for mask in MASKS)))
    np.testing.assert_array_equal(source.fields_of(3)["mask"], MASKS[3])


def test_classes_are_those_that_are_given():
    assert len(opened((IMAGES, MASKS), num_classes=9).class_names) == 9
    assert opened((IMAGES, MASKS), class_names=("a", "b", "c")).class_names == ("a", "b", "c")
    assert len(opened((IMAGES, MASKS), "train[:50%]")) == 2


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ((IMAGES, MASKS[:3]), {}, "have 4 images and 3 masks"),
        ((IMAGES, MASKS), {"num_classes": 2}, r"example 0: 2 \(.* beyond the 2 classes"),
        (
            (IMAGES, MASKS * 2),
            {},
            "have the values 0, 2, 4, 254, and 255 .*config.data.num_classes",
        ),
        ((IMAGES, MASKS / 2), {}, r"example 0: a mask must be integers \[height, width\], not"),
        ((IMAGES, MASKS.astype(int) - 1), {}, "example 0: a mask has the value -1: unknown pixels"),
        (Torch({"image": IMAGES[0], "x": 1}), {}, "there is none of mask, .* but image, x"),
        (Torch(IMAGES[0]), {}, r"a ndarray is no pair \(image, mask\)"),
    ],
    ids=["length", "beyond", "gaps", "floats", "negative", "key", "alone"],
)
def test_unusable_masks_are_explained(data, options, message):
    with pytest.raises(UserError, match=message):
        opened(data, **options)
