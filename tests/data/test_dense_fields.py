"""Masks, boxes and depth maps are cropped and flipped in the same way as their image."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import chisquare

from vit_jax.data import dense_fields
from vit_jax.data.dense_fields import boxes_field, depth_field, instances_field, mask_field
from vit_jax.data.fields import IGNORED, Boxes
from vit_jax.data.pipeline import training_batches
from vit_jax.data.preprocess import PADDING, FixedCrop, TestCrop, TrainCrop
from vit_jax.data.sources import open_handed_in, open_source
from vit_jax.data.views import ViewSpec
from vit_jax.errors import UserError
from vit_jax.options.data import CROPS, INTERPOLATIONS, TEST_CROPS
from vit_jax.training.mixing import augment

SIZE = 48
PLACED = [kind for kind in CROPS if kind != "simple_random"]
# Edges of a warped mask may differ from those of the warped image by this number of pixels.
EDGE = 1


def rectangle(height: int, width: int, edges: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns a uint8 mask of a rectangle, and the rectangle's corners in pixels.

    The rectangle is at least 10 pixels wide and high, so that nearest-neighbour sampling finds it.

    Args:
      edges: left and right edge, and top and bottom edge, each pair in any order, as shares of
        the image's sides.
    """
    left, right = (round(x * width) for x in sorted(edges[:2]))
    top, bottom = (round(x * height) for x in sorted(edges[2:]))
    right, bottom = max(right, left + 10), max(bottom, top + 10)
    mask = np.zeros((height, width), np.uint8)
    mask[top:bottom, left:right] = 1
    return mask, np.array([[left, top, right, bottom]], np.float32)


def image_of(mask: np.ndarray, encoded: bool) -> np.ndarray | bytes:
    """Returns a white shape on black, as an array or as a JPEG."""
    pixels = np.repeat(255 * mask[..., None], 3, axis=-1)
    if not encoded:
        return pixels
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95, subsampling=0)
    return file.getvalue()


def crops() -> list:
    train = [
        TrainCrop(SIZE, kind, resize=SIZE + 8, interpolation=interpolation)
        for kind in PLACED
        for interpolation in ("bilinear", "bilinear_antialias", "area")
    ]
    test = [
        FixedCrop(TestCrop(SIZE, kind, SIZE + 8, interpolation=interpolation))
        for kind in TEST_CROPS
        for interpolation in INTERPOLATIONS
    ]
    return train + test


def interior(mask: np.ndarray, pixels: int) -> np.ndarray:
    """Returns which pixels have only neighbours of the same value within a distance of `pixels`.

    Neighbours beyond the image's edges count as different.
    """
    padded = np.pad(mask, pixels, constant_values=IGNORED)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (2 * pixels + 1,) * 2)
    return (windows == mask[..., None, None]).all((2, 3))


@pytest.mark.parametrize("encoded", [False, True], ids=["array", "jpeg"])
@pytest.mark.parametrize("crop", crops(), ids=str)
@settings(max_examples=10, deadline=None)
@given(
    sides=st.tuples(st.integers(30, 200), st.integers(30, 200)),
    edges=st.tuples(*[st.floats(0, 0.6)] * 4),
    seed=st.integers(0, 1000),
)
def test_mask_and_box_follow_the_crop(crop, encoded, sides, edges, seed):
    mask, corners = rectangle(*sides, edges)
    pixels = crop(image_of(mask, encoded), np.random.default_rng(seed))[..., 0]
    place = crop.place(*sides, np.random.default_rng(seed))
    warped = mask_field(SIZE).encode(mask, place)
    shown = warped != IGNORED
    assert shown.sum() == place.shown[0] * place.shown[1]
    assert not shown[place.shown[0] :].any() and not shown[:, place.shown[1] :].any()
    # In an enlarged image, one original pixel may be wider than the border.
    edge = EDGE + int(max(place.shown[0] / place.box.height, place.shown[1] / place.box.width))
    inner = interior(warped, edge) & shown
    np.testing.assert_array_equal((pixels > 127)[inner], (warped == 1)[inner])
    _check_box(boxes_field(SIZE, 2).encode(Boxes(corners, np.array([3])), place), warped, place)


def _check_box(boxes: np.ndarray, warped: np.ndarray, place) -> None:
    """Compares the box of a rectangle with its warped mask, whose edges are rounded."""
    assert boxes[1].tolist() == [0, 0, 0, 0, -1]
    rows, columns = np.nonzero(warped == 1)
    if boxes[0, 4] == -1:
        return  # Too small a part of the rectangle is in the crop.
    left, top, right, bottom, label = boxes[0]
    assert label == 3
    if len(rows):
        found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        np.testing.assert_allclose([left, top, right, bottom], found, atol=1)


@pytest.mark.parametrize("seed", range(4))
def test_mask_and_box_follow_the_flip(seed):
    rng = np.random.default_rng(seed)
    masks, boxes = np.zeros((8, SIZE, SIZE), np.uint8), np.zeros((8, 2, 5), np.float32)
    boxes[..., 4] = -1
    for mask, rows in zip(masks, boxes, strict=True):
        left, top = rng.integers(0, SIZE // 2, 2)
        right, bottom = rng.integers(SIZE // 2, SIZE, 2)
        mask[top:bottom, left:right] = 1
        rows[0] = left, top, right, bottom, 7
    batch = {
        "image": jnp.repeat(masks[..., None], 3, -1),
        "labels": jnp.zeros((8, 1), jnp.int32),
        "mask": jnp.array(masks),
        "boxes": jnp.array(boxes),
    }
    fields = {"mask": "map", "boxes": "boxes"}
    flipped = jax.device_get(augment(batch, jax.random.key(seed), flip=True, spatial=fields))
    np.testing.assert_array_equal(flipped["image"][..., 0], flipped["mask"])
    assert (flipped["mask"] != masks).any(axis=(1, 2)).sum() not in (0, 8)
    for mask, (box, _) in zip(flipped["mask"], flipped["boxes"], strict=True):
        rows, columns = np.nonzero(mask)
        found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1, 7]
        np.testing.assert_allclose(box, found)
    np.testing.assert_array_equal(flipped["boxes"][:, 1, 4], -1)


def placed(height=SIZE, width=SIZE, crop=None):
    crop = crop or FixedCrop(TestCrop(SIZE, "fit", SIZE))
    return crop.place(height, width, np.random.default_rng(0))


def test_depth_keeps_its_metres_and_pads_with_unknown():
    depth = np.arange(24 * 48, dtype=np.float32).reshape(24, 48)
    encoded = depth_field(SIZE).encode(depth, placed(24, 48))
    np.testing.assert_array_equal(encoded[:24], depth)
    assert not encoded[24:].any() and encoded.dtype == np.float32


def test_hidden_and_small_boxes_are_removed():
    # The crop is the central square, columns 24 to 72.
    middle = placed(48, 96, FixedCrop(TestCrop(SIZE, "short_side", SIZE)))
    corners = [[0, 0, 23, 9], [0, 0, 26, 9], [0, 0, 27, 9], [30, 5, 30.5, 9]]
    boxes = Boxes(np.array(corners, np.float32), np.arange(4, dtype=np.int32))
    # 2 of 26 columns are a smaller share, 3 of 27 a larger one.
    assert dense_fields.MIN_VISIBLE == 0.1
    encoded = boxes_field(SIZE, 5).encode(boxes, middle)
    assert encoded[:, 4].tolist() == [2, -1, -1, -1, -1]
    np.testing.assert_allclose(encoded[0, :4], [0, 0, 3, 9])


def test_crowds_are_no_objects_and_have_the_last_places():
    corners = np.array([[0, 0, 30, 30], [0, 0, 9, 9], [20, 20, 25, 25]], np.float32)
    boxes = Boxes(corners, np.array([4, 5, 6]), None, np.array([True, False, False]), (SIZE, SIZE))
    encoded = boxes_field(SIZE, 4).encode(boxes, placed())
    assert encoded[:, 4].tolist() == [-6, 5, 6, -1]
    decoded = dense_fields.boxes_of(encoded)
    np.testing.assert_array_equal(decoded.corners, corners)
    assert decoded.labels.tolist() == [4, 5, 6] and decoded.crowd.tolist() == [True, False, False]
    assert boxes_field(SIZE, 2).encode(boxes, placed())[:, 4].tolist() == [5, 6]


def test_boxes_of_an_image_of_another_size_are_rejected():
    boxes = Boxes(np.array([[0, 0, 9, 9]], np.float32), np.zeros(1, np.int32), size=(24, 48))
    with pytest.raises(
        UserError, match="has 48x48 pixels, and its annotations are of 48x24: .*EXIF"
    ):
        boxes_field(SIZE, 2).encode(boxes, placed())


def test_largest_boxes_are_kept_in_their_order():
    corners = np.array([[0, 0, 5, 5], [0, 0, 2, 2], [0, 0, 9, 9], [0, 0, 3, 3]], np.float32)
    encoded = boxes_field(SIZE, 2).encode(Boxes(corners, np.arange(4)), placed())
    assert encoded[:, 4].tolist() == [0, 2]


@given(
    crop=st.sampled_from(crops()),
    sides=st.tuples(st.integers(40, 120), st.integers(40, 120)),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_pixels_of_objects_are_within_their_boxes(crop, sides, seed):
    """The objects are rectangles in four separate cells, so that they do not overlap.

    Only three objects are kept.
    """
    height, width = sides
    rng = np.random.default_rng(seed)
    rows, columns = np.indices(sides)
    corners, masks = np.zeros((4, 4), np.float32), np.zeros((4, height, width), bool)
    for number, (box, mask) in enumerate(zip(corners, masks, strict=True)):
        cell = np.array([number % 2 * (width // 2), number // 2 * (height // 2)])
        start = cell + rng.integers(0, 6, 2)
        box[:] = *start, *(start + rng.integers(10, 14, 2))
        left, top, right, bottom = box
        mask[:] = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    objects = Boxes(corners, np.arange(4), masks)
    placement = crop.place(height, width, np.random.default_rng(seed))
    boxes = boxes_field(SIZE, 3).encode(objects, placement)
    instances = instances_field(SIZE, 3).encode(objects, placement)
    present = np.flatnonzero(boxes[:, 4] >= 0)
    assert {*np.unique(instances)} <= {*present.tolist(), IGNORED}
    for row in present.tolist():
        label = int(boxes[row, 4])
        expected = placement.place_map(masks[label], False, np.zeros((SIZE, SIZE), bool))
        np.testing.assert_array_equal(instances == row, expected)
        found_rows, found_columns = np.nonzero(expected)
        edges = boxes[row, :4] - np.tile([1, 1], 2) * np.array([1, 1, -1, -1])
        assert (found_columns + 1 >= edges[0]).all() and (found_columns <= edges[2]).all()
        assert (found_rows + 1 >= edges[1]).all() and (found_rows <= edges[3]).all()


def test_smaller_objects_are_in_front_and_others_have_no_row():
    masks = np.zeros((3, SIZE, SIZE), bool)
    masks[0, 2:4, 2:4], masks[1, :20, :20], masks[2, 30:, 30:] = True, True, True
    corners = np.array([[2, 2, 4, 4], [0, 0, 20, 20], [30, 30, 48, 48]], np.float32)
    objects = Boxes(corners, np.array([5, 6, 7]), masks)
    whole = instances_field(SIZE, 3).encode(objects, placed())
    assert (whole[3, 3], whole[5, 5], whole[40, 40], whole[25, 25]) == (0, 1, 2, IGNORED)
    largest = instances_field(SIZE, 2).encode(objects, placed())
    assert (largest[3, 3], largest[5, 5], largest[40, 40]) == (0, 0, 1)
    with pytest.raises(UserError, match="the objects have no masks"):
        instances_field(SIZE, 2).encode(objects._replace(masks=None), placed())


def test_image_without_boxes_has_rows_of_padding():
    none = Boxes(np.zeros((0, 4), np.float32), np.zeros(0, np.int32))
    encoded = boxes_field(SIZE, 3).encode(none, placed())
    np.testing.assert_array_equal(encoded, [[0, 0, 0, 0, -1]] * 3)


@pytest.mark.parametrize(
    ("corners", "message"),
    [
        ([9, 9, 9, 20], r"the box \(9, 9, 9, 20\) has no area"),
        ([40, 40, 30, 47], r"the box \(40, 40, 30, 47\) has no area"),
        ([40, 40, 60, 47], r"\(40, 40, 60, 47\).* is not within the image of 48x48 pixels"),
        ([-2, 40, 20, 47], r"\(-2, 40, 20, 47\).* is not within"),
    ],
)
def test_invalid_boxes_are_rejected(corners, message):
    boxes = Boxes(np.array([[0, 0, 9, 9], corners], np.float32), np.zeros(2, np.int32))
    with pytest.raises(UserError, match=message):
        boxes_field(SIZE, 2).encode(boxes, placed())


def test_crop_with_a_mirrored_border_is_rejected():
    with pytest.raises(UserError, match="'simple_random' mirrors the borders of images"):
        placed(crop=TrainCrop(SIZE, "simple_random"))


def test_map_of_another_size_than_its_image_is_rejected():
    with pytest.raises(UserError, match=r"the image has 48x48 pixels, .* 30x20: save both"):
        mask_field(SIZE).encode(np.zeros((20, 30), np.uint8), placed())


def test_synthetic_images_have_every_field():
    values = open_source("synthetic", "train", image_size=SIZE).fields_of(5)
    fields = mask_field(SIZE), boxes_field(SIZE, 3), depth_field(SIZE)
    mask, boxes, depth = (field.encode(values[field.name], placed()) for field in fields)
    assert mask.max() < 10 and depth.min() >= 1
    assert boxes[:, 4].tolist() == [0, 9, -1]


def two_classes(width: int, second: int) -> np.ndarray:
    """Returns a mask that is 32 pixels high.

    It has 4 ignored columns at the left, `second` columns of class 1 at the right, and class 0
    between.
    """
    mask = np.zeros((32, width), np.uint8)
    mask[:, :4], mask[:, -second:] = IGNORED, 1
    return mask


def test_crops_are_drawn_again_as_often_as_by_mmsegmentation():
    # A crop must contain at least 9 of the last 12 columns.
    mask, size = two_classes(60, 12), 32
    counts = [np.unique(mask[:, left : left + size], return_counts=True) for left in range(29)]
    counts = [count[classes != IGNORED] for classes, count in counts]
    good = np.array([len(count) > 1 and count.max() / count.sum() < 0.75 for count in counts])
    assert good.sum() == 4
    # There are at most eleven crops. The last one is accepted in any case.
    missed = (1 - good.mean()) ** np.arange(11)
    expected = np.where(good, missed.sum(), missed[-1]) / len(good)
    field = mask_field(size, 0.75)
    crop = TrainCrop(size, "scale_jitter", scale=(1, 1), accepts=lambda x: field.accepts(mask, x))
    rng = np.random.default_rng(0)
    lefts = [round(crop.place(*mask.shape, rng).box.left) for _ in range(4000)]
    found = np.bincount(lefts, minlength=len(good))
    assert chisquare(found, 4000 * expected).pvalue > 1e-3


def test_masks_of_a_batch_follow_crops_that_are_drawn_again():
    masks = np.stack([two_classes(60, 20)] * 2)
    images = np.repeat(255 * (masks[..., None] == 1), 3, -1).astype(np.uint8)
    source = open_handed_in({"train": (images, masks)}, "train", labels=False, fields=("mask",))

    def batch(cat_max_ratio):
        crop, fields = TrainCrop(32, "scale_jitter"), (mask_field(32, cat_max_ratio),)
        values = dict(seed=0, first_step=0, workers=0, batch_size=64)
        return next(training_batches(source, crop=crop, fields=fields, **values))

    def rejected(mask):
        share = (mask == 1).sum() / (mask != IGNORED).sum()
        return max(share, 1 - share) >= 0.75

    free, limited = batch(1.0), batch(0.75)
    for image, mask in zip(limited["image"], limited["mask"], strict=True):
        assert ((image[..., 0] > 127) == (mask == 1))[mask != IGNORED].mean() > 0.9
    before, after = ([*map(rejected, entry["mask"])] for entry in (free, limited))
    assert np.mean(before) > 0.5 and np.mean(after) < 0.05
    kept = [np.array_equal(*pair) for pair in zip(free["mask"], limited["mask"], strict=True)]
    assert kept == [not redrawn for redrawn in before]


@pytest.mark.parametrize("with_masks", [True, False])
def test_padding_keeps_its_colour_when_the_image_is_distorted(with_masks):
    images = np.random.default_rng(0).integers(256, size=(8, 30, 60, 3), dtype=np.uint8)
    masks = np.random.default_rng(1).integers(2, size=images.shape[:3], dtype=np.uint8)
    source = open_handed_in(
        {"train": (images, masks if with_masks else [0] * 8)},
        "train",
        labels=not with_masks,
        fields=("mask",) if with_masks else (),
    )
    fields = (mask_field(SIZE),) if with_masks else ()
    crop, heights = TrainCrop(SIZE, "scale_jitter", scale=(0.5, 0.6)), []

    def invert(pixels, rng):
        heights.append(pixels.shape[0])
        return 255 - pixels

    def batch(augment):
        view = ViewSpec("image", SIZE, crop, augment)
        values = dict(seed=0, first_step=0, workers=0, threads=1, batch_size=4)
        return next(training_batches(source, views=(view,), fields=fields, **values))

    for plain, inverted in zip(batch(None)["image"], batch(invert)["image"], strict=True):
        height = heights.pop(0)
        assert 0.5 * SIZE <= height <= 0.6 * SIZE
        np.testing.assert_array_equal(inverted[:height], 255 - plain[:height])
        assert (inverted[height:] == PADDING).all() and (plain[height:] == PADDING).all()
