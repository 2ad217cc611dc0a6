"""Training and evaluation crops: their rectangles, and the pixels after resizing."""

import importlib.util
import json
from fractions import Fraction

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.golden import make_inception
from tests.data.malformed import encode, exif, picture
from tests.data.test_decode import difference, jpeg, natural
from vit_jax.data.preprocess import TestCrop, TrainCrop, inception_box, part_box, random_resized_box
from vit_jax.errors import UserError
from vit_jax.options.data import CROPS, INTERPOLATIONS

sides = st.integers(1, 5000)


@pytest.mark.parametrize("draw", [inception_box, random_resized_box])
@given(sides, sides, st.integers(0, 2**32))
def test_random_box_lies_within_the_image(draw, height, width, seed):
    left, top, right, bottom = draw(np.random.default_rng(seed), height, width)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def boxes(draw, height, width, area, aspect, draws=30_000):
    rng = np.random.default_rng(0)
    return np.array([draw(rng, height, width, area, aspect) for _ in range(draws)])


def farthest(found: np.ndarray, shares: dict, height: int, width: int) -> float:
    """Returns the largest difference between the actual and the expected shares of rectangles.

    Args:
      shares: for each measure, pairs of a value and the expected share of rectangles up to it.
    """
    values = make_inception.measures(found, height, width)
    return max(
        abs((values[name] <= x).mean() - y) for name, pairs in shares.items() for x, y in pairs
    )


@pytest.mark.parametrize("case", make_inception.CASES)
def test_inception_boxes_are_spread_as_those_of_tensorflows_operator(case):
    """Compares with TensorFlow's operator if it is installed, otherwise with stored quantiles."""
    height, width, *ranges = make_inception.CASES[case]
    # The operator tries a hundred times per draw.
    draws = 500 if case == "too wide for any" else 30_000
    if importlib.util.find_spec("tensorflow"):
        drawn = make_inception.draw(height, width, *ranges, draws)
        expected = make_inception.shares(drawn, height, width)
    else:
        expected = json.loads(make_inception.GOLDEN.read_text())[case]
    assert (
        farthest(boxes(inception_box, height, width, *ranges, draws), expected, height, width)
        < 0.015
    )


def test_small_crops_are_more_frequent_in_inception_than_in_random_resized():
    photograph = make_inception.CASES["photograph"]
    expected = json.loads(make_inception.GOLDEN.read_text())["photograph"]
    for draw, share in ((inception_box, 0.25), (random_resized_box, 0.14)):
        found = boxes(draw, *photograph)
        assert (make_inception.measures(found, 375, 500)["area"] < 0.15).mean() == pytest.approx(
            share, abs=0.01
        )
    # The test above would detect the other kind of crop.
    assert farthest(found, expected, 375, 500) > 0.1


def test_random_resized_boxes_have_a_uniform_area_and_logarithm_of_the_aspect_ratio():
    """As in torchvision's documentation. Every draw fits into the image for this range of areas."""
    found = make_inception.measures(
        boxes(random_resized_box, 1000, 1000, (0.05, 0.5), (3 / 4, 4 / 3)), 1000, 1000
    )
    logarithm = np.log(found["aspect"]) / np.log(16 / 9) + 0.5
    for values in (
        (found["area"] - 0.05) / 0.45,
        logarithm,
        found["left"] / (1000 - found["width"]),
    ):
        quantiles = np.linspace(0.05, 0.95, 19)
        np.testing.assert_allclose([(values <= x).mean() for x in quantiles], quantiles, atol=0.015)


def test_image_too_narrow_for_any_draw_gives_the_whole_or_the_central_rectangle():
    narrow = dict(height=1000, width=10, area=(0.9, 1.0))
    assert inception_box(np.random.default_rng(0), **narrow) == (0, 0, 10, 1000)
    assert random_resized_box(np.random.default_rng(0), **narrow) == (0, 493, 10, 506)


@given(
    sides,
    sides,
    st.sampled_from(("square", "short_side")),
    st.integers(1, 500),
    st.integers(0, 500),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_part_box_lies_within_the_image(height, width, kind, size, more, x, y):
    left, top, right, bottom = part_box(height, width, kind, size + more, size, x, y)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("kind", CROPS)
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_train_crop_is_a_function_of_its_draws(kind, mode, interpolation):
    crop = TrainCrop(16, kind, resize=20, mode=mode, interpolation=interpolation)
    image = encode(picture())
    first, again, other = (crop(image, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert first.shape == (16, 16, 3) and first.dtype == np.uint8
    np.testing.assert_array_equal(first, again)
    assert np.array_equal(first, other) == (kind == "none")


def test_train_crop_keeps_left_and_right():
    ramp = np.tile(np.arange(64, dtype=np.uint8)[None, :, None], (64, 1, 3))
    for seed in range(50):
        crop = TrainCrop(16)(ramp, np.random.default_rng(seed))
        assert crop[0, 0, 0] < crop[0, -1, 0]


@pytest.mark.parametrize(("kind", "expected"), [("square", 16 / 9), ("short_side", 1)])
def test_random_part_of_a_wide_image_is_squeezed_or_not(kind, expected):
    y, x = np.mgrid[:90, :160].astype(np.uint8)
    crop = TrainCrop(45, kind, resize=90)(np.stack([x, y, y], -1), np.random.default_rng(0))
    across, down = np.ptp(crop[0, :, 0].astype(int)), np.ptp(crop[:, 0, 1].astype(int))
    assert across / down == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("kind", ["square", "short_side"])
def test_random_part_reaches_every_edge(kind):
    y, x = np.mgrid[:100, :120].astype(np.uint8)
    image = np.stack([x, y, y], -1)
    crops = [
        TrainCrop(50, kind, resize=100)(image, np.random.default_rng(seed)) for seed in range(200)
    ]
    assert (
        min(crop[..., 0].min() for crop in crops) < 5
        and max(crop[..., 0].max() for crop in crops) > 114
    )
    assert (
        min(crop[..., 1].min() for crop in crops) < 5
        and max(crop[..., 1].max() for crop in crops) > 94
    )


def test_short_side_test_crop_keeps_the_aspect_ratio_and_the_centre():
    pixels = np.zeros((100, 300, 3), np.uint8)
    pixels[40:60, 140:160] = 255  # A square in the middle of a wide image.
    bright = np.argwhere(TestCrop(50, resize=50)(pixels)[..., 0] > 127)
    assert tuple(bright.min(0)) == (20, 20)
    assert tuple(bright.max(0)) == (29, 29)


def test_square_test_crop_of_its_own_size_is_all_of_the_image():
    pixels = np.zeros((100, 300, 3), np.uint8)
    pixels[:50, :150] = 255
    crop = TestCrop(50, "square", resize=50)(pixels)
    assert crop[:24, :24].min() == 255 and crop[26:].max() == 0 and crop[:, 26:].max() == 0


@pytest.mark.parametrize("kind", ["square", "short_side"])
def test_test_crop_leaves_out_the_margin(kind):
    pixels = np.zeros((256, 256, 3), np.uint8)
    pixels[16:240, 16:240] = 200
    assert TestCrop(224, kind, resize=256)(pixels).min() == 200


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_test_crop_of_height_and_width_keeps_the_aspect_ratio_and_the_centre(mode):
    pixels = np.zeros((120, 300, 3), np.uint8)
    pixels[50:70, 140:160] = 255
    crop = TestCrop((60, 100), resize=60, mode=mode)(encode(pixels, quality=95))
    bright = np.argwhere(crop[..., 0] > 127)
    assert crop.shape == (60, 100, 3)
    assert (tuple(bright.min(0)), tuple(bright.max(0))) == ((25, 45), (34, 54))


@given(sides, sides, st.integers(1, 500), st.integers(1, 500))
def test_part_of_height_and_width_is_the_largest_of_its_aspect_ratio(height, width, rows, columns):
    box = part_box(height, width, "short_side", min(rows, columns), (rows, columns), 0.5, 0.5)
    assert box.height == height or box.width == width
    # Sides are whole numbers of pixels.
    assert abs(box.width - box.height * columns / rows) <= 1 + columns / rows
    left, top, right, bottom = box
    assert 0 <= left < right <= width and 0 <= top < bottom <= height


def literal(
    pixels: np.ndarray, kind: str, resize: int, size: int, resample: Image.Resampling, half="even"
) -> np.ndarray:
    """Resizes the whole image with Pillow and crops its centre.

    The sides are computed as in torchvision's `Resize`.
    """
    height, width = pixels.shape[:2]
    short = min(height, width)
    rows, columns = (
        int(resize * side / short) if kind == "short_side" else resize for side in (height, width)
    )
    resized = np.asarray(Image.fromarray(pixels).resize((columns, rows), resample))
    # torchvision and timm round half to even; Transformers truncates.
    middle = round if half == "even" else int
    top, left = middle((rows - size) / 2), middle((columns - size) / 2)
    return resized[top : top + size, left : left + size]


PILLOWS = {
    "bilinear_antialias": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(1, 100),
    st.integers(0, 60),
    st.sampled_from(("square", "short_side")),
    st.sampled_from(sorted(PILLOWS)),
    st.sampled_from(("even", "down")),
    st.integers(0, 9),
)
def test_exact_test_crop_is_bit_exact_with_pillows_resize_and_a_central_crop(
    height, width, size, more, kind, interpolation, half, seed
):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    crop = TestCrop(size, kind, size + more, "exact", interpolation, half=half)
    expected = literal(pixels, kind, size + more, size, PILLOWS[interpolation], half)
    np.testing.assert_array_equal(crop(encode(pixels, "PNG")), expected)


@pytest.mark.parametrize(("share", "size"), [(0.9, 224), (0.96, 384), (0.95, 224), (0.875, 96)])
@pytest.mark.parametrize("kind", ["square", "short_side"])
def test_share_of_the_crop_is_cut_to_whole_pixels(share, size, kind):
    """timm resizes to the image size divided by the share, truncated: 224 / 0.9 gives 248."""
    pixels = natural(250, 317)
    crop = TestCrop(size, kind, size / share, "exact", "bicubic")
    expected = literal(
        pixels, kind, int(Fraction(size) / Fraction(str(share))), size, PILLOWS["bicubic"]
    )
    np.testing.assert_array_equal(crop(pixels), expected)


def test_exact_test_crop_of_height_and_width_has_the_bits_of_timms():
    """As timm's `ResizeKeepRatio`: the size that fills the crop divided by its share, rounded."""
    pixels = natural(210, 333)
    crop = TestCrop((96, 160), "short_side", 96 / 0.9, "exact", "bicubic")
    rows, columns = 106, 177  # 96 / 0.9 and 160 / 0.9.
    ratio = min(210 / rows, 333 / columns)
    rows, columns = round(210 / ratio), round(333 / ratio)
    resized = np.asarray(Image.fromarray(pixels).resize((columns, rows), Image.Resampling.BICUBIC))
    top, left = round((rows - 96) / 2), round((columns - 160) / 2)
    np.testing.assert_array_equal(crop(pixels), resized[top : top + 96, left : left + 160])


def test_very_long_image_is_resized_in_part_only_and_to_the_same_picture():
    """The whole image would be resized to 51,200 x 512 pixels."""
    pixels = natural(20, 2000)
    crop = TestCrop(448, "short_side", 512, "exact", "bicubic")(pixels)
    whole = literal(pixels, "short_side", 512, 448, Image.Resampling.BICUBIC)
    assert np.abs(crop.astype(int) - whole).max() <= 2
    assert TestCrop(8, "short_side", 8, "exact", "bicubic")(
        np.zeros((1, 3_000_000, 3), np.uint8)
    ).shape == (
        8,
        8,
        3,
    )


@pytest.mark.parametrize("interpolation", [*sorted(PILLOWS), "area"])
@pytest.mark.parametrize(("shape", "most"), [((150, 200), 0.1), ((480, 640), 1.2)])
def test_fast_test_crop_is_near_the_exact_one(interpolation, shape, most):
    """The difference is also small if the JPEG is decoded at half size: docs/measurements.md."""
    data = jpeg(natural(*shape), quality=92)
    fast, exact = (
        TestCrop(90, "short_side", 100, mode, interpolation)(data) for mode in ("fast", "exact")
    )
    assert difference(fast, exact) < most


@pytest.mark.parametrize("interpolation", [*sorted(PILLOWS), "area"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_fast_crop_of_a_turned_jpeg_is_upright_in_every_interpolation(interpolation, orientation):
    data = encode(natural(310, 270), quality=95, exif=exif(orientation))
    fast, exact = (
        TestCrop((48, 40), "short_side", 44, mode, interpolation)(data)
        for mode in ("fast", "exact")
    )
    assert difference(fast, exact) < 1.5


@pytest.mark.parametrize("orientation", [3, 6])
@pytest.mark.parametrize(("kind", "shape"), [("square", (450, 457)), ("short_side", (457, 457))])
def test_turned_jpeg_of_any_size_is_cropped_at_its_edge(kind, shape, orientation):
    """By rounding, 224 * (457 / 224) is above 457, so an edge is 6e-14 pixels outside the image."""
    data = encode(natural(*shape), quality=95, exif=exif(orientation))
    fast, exact = (TestCrop(224, kind, 224, mode, "bicubic")(data) for mode in ("fast", "exact"))
    assert difference(fast, exact) < 1.5


@pytest.mark.parametrize("interpolation", sorted(PILLOWS))
def test_train_crop_is_pillows_resize_of_the_rectangle_alone(interpolation):
    """As in torchvision's `RandomResizedCrop`: the filter uses no pixels outside the rectangle."""
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8)
    crop = TrainCrop(32, "random_resized", interpolation=interpolation, mode="exact")
    box = random_resized_box(np.random.default_rng(5), 90, 120)
    part = Image.fromarray(pixels[box.top : box.bottom, box.left : box.right])
    expected = np.asarray(part.resize((32, 32), PILLOWS[interpolation]))
    np.testing.assert_array_equal(crop(pixels, np.random.default_rng(5)), expected)


@pytest.mark.parametrize("kind", ["square", "short_side"])
def test_random_part_is_a_place_in_pillows_resized_image(kind):
    pixels = np.random.default_rng(0).integers(0, 256, (70, 90, 3), np.uint8)
    sides = (40, 40) if kind == "square" else (40, 51)
    resized = np.asarray(Image.fromarray(pixels).resize(sides[::-1], Image.Resampling.BICUBIC))
    crop = TrainCrop(38, kind, resize=40, interpolation="bicubic")
    places = [
        resized[top : top + 38, left : left + 38]
        for top in range(3)
        for left in range(sides[1] - 37)
    ]
    seen = set()
    for seed in range(200):
        found = crop(pixels, np.random.default_rng(seed))
        seen |= {number for number, place in enumerate(places) if np.array_equal(found, place)}
    assert seen == set(range(len(places)))


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [
        (100, 130, 33, 41),
        (64, 48, 16, 24),
        (20, 30, 47, 71),
        (20, 90, 40, 31),
        (90, 20, 31, 40),
        (32, 32, 32, 32),
    ],
)
def test_area_is_the_mean_of_the_covered_pixels(height, width, rows, columns):
    """This is also tested if one side grows and the other shrinks, where OpenCV averages only two
    pixels.
    """
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    expected = np.einsum("yi,ijc,xj->yxc", covered(height, rows), pixels, covered(width, columns))
    crop = TestCrop((rows, columns), "square", min(rows, columns), "exact", "area")
    np.testing.assert_allclose(crop(pixels), expected, atol=1.01)
    if rows <= height and columns <= width:
        opencv = cv2.resize(pixels, (columns, rows), interpolation=cv2.INTER_AREA)
        np.testing.assert_array_equal(crop(pixels), opencv)


def covered(before: int, after: int) -> np.ndarray:
    """Returns the share of each pixel before resizing in each pixel after it, `[after, before]`."""
    edges, pixel = np.arange(after + 1) * before / after, np.arange(before)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    return overlap.clip(0) * after / before


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_only_bilinear_without_antialiasing_aliases_stripes(interpolation):
    """With antialiasing, stripes finer than output pixels become grey. Without it, they alias."""
    stripes = np.tile(
        np.array([0, 255, 255], np.uint8)[np.arange(180) % 3][None, :, None], (180, 1, 3)
    )
    crop = TestCrop(100, "square", 100, "exact", interpolation)(stripes)[:, 10:-10].astype(int)
    assert (np.ptp(crop) > 150) == (interpolation == "bilinear")


@pytest.mark.parametrize(("height", "width"), [(50, 70), (70, 50), (31, 200), (32, 32)])
def test_simple_random_crop_has_the_bits_of_torchvisions(height, width, torch, monkeypatch):
    """As in DeiT III's code: a crop of the resized image with four mirrored pixels at each side."""
    transforms = pytest.importorskip("torchvision.transforms")
    theirs = transforms.Compose(
        [
            transforms.Resize(32, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.RandomCrop(32, padding=4, padding_mode="reflect"),
        ]
    )
    image, ours = (
        natural(height, width),
        TrainCrop(32, "simple_random", mode="exact", interpolation="bicubic"),
    )
    places = set()
    for seed in range(60):
        draws = np.random.default_rng(seed).random(2)

        def place(padded, size, draws=draws):
            starts = [
                int(draw * (side - 32 + 1))
                for draw, side in zip(draws, padded.size[::-1], strict=True)
            ]
            places.add(tuple(starts))
            return *starts, *size

        monkeypatch.setattr(transforms.RandomCrop, "get_params", staticmethod(place))
        expected = np.asarray(theirs(Image.fromarray(image)))
        np.testing.assert_array_equal(ours(image, np.random.default_rng(seed)), expected)
    assert min(min(place) for place in places) == 0 and len(places) > 20


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize(
    "kind", ["inception", "random_resized", "none", "short_side", "square", "simple_random"]
)
def test_every_interpolation_has_the_same_picture_in_the_same_place(mode, interpolation, kind):
    data = encode(picture(600, 800), quality=97)
    plain, other = (
        TrainCrop(64, kind, resize=72, mode=mode, interpolation=name)(
            data, np.random.default_rng(3)
        )
        for name in ("bilinear", interpolation)
    )
    assert difference(plain, other) < 2.5


def test_test_crop_that_would_need_padding_is_refused():
    with pytest.raises(UserError, match="224 pixels cannot be taken of an image resized to 200"):
        TestCrop(224, "short_side", 200)


@pytest.mark.parametrize(
    ("size", "kind", "words"),
    [
        (224, "short_side", "the short side to 256, the centre 224x224, bilinear"),
        (224, "square", "both sides to 256, the centre 224x224, bilinear"),
        ((224, 128), "short_side", "the image to cover 448x256, the centre 224x128, bilinear"),
        ((224, 128), "square", "all of the image to 448x256, the centre 224x128, bilinear"),
    ],
)
def test_the_text_of_a_crop_names_the_sides_that_are_resized(size, kind, words):
    assert str(TestCrop(size, kind, 256)) == words
