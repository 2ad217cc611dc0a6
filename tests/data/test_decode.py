"""Decoded rectangles of images equal parts of whole images that were decoded by Pillow."""

import functools
import io

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.data.malformed import corpus, encode, exif, picture, segment, segments, shown
from vit_jax.data import decode as module
from vit_jax.data.decode import Box, decode, is_fast, open_image, resize

pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")
needs_extension = pytest.mark.skipif(
    not is_fast(), reason="vit_jax was installed without libjpeg-turbo"
)
SAMPLING = {
    name: getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{name}")
    for name in ("444", "422", "420", "440", "411")
}


@functools.cache
def natural(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Returns an image with the spectrum of photographs: the amplitude is proportional to 1 /
    frequency.
    """
    rng = np.random.default_rng(seed)
    y, x = np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None]
    amplitude = 1 / np.maximum(np.hypot(y, x), 1 / max(height, width))
    noise = np.fft.fft2(rng.standard_normal((height, width, 3)), axes=(0, 1))
    pixels = np.fft.ifft2(noise * amplitude[..., None], axes=(0, 1)).real
    # Most of the variation is brightness.
    pixels = pixels @ [[1, 0.9, 0.8], [0.3, 0, -0.3], [-0.1, 0.2, -0.1]]
    return (pixels / pixels.std() * 50 + 128).clip(0, 255).astype(np.uint8)


def jpeg(pixels: np.ndarray, sampling="420", progressive=False, quality=90, restart=0) -> bytes:
    options = {
        cv2.IMWRITE_JPEG_QUALITY: quality,
        cv2.IMWRITE_JPEG_PROGRESSIVE: int(progressive),
        cv2.IMWRITE_JPEG_RST_INTERVAL: restart,
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR: SAMPLING[sampling],
    }
    return cv2.imencode(".jpg", pixels[..., ::-1], [x for pair in options.items() for x in pair])[
        1
    ].tobytes()


def whole(data: bytes, mode: str = "fast") -> np.ndarray:
    opened = open_image(data, mode)
    return opened.region(Box(0, 0, opened.width, opened.height), max(opened.height, opened.width))


def crop(data: bytes | np.ndarray, box: Box, size: int, mode: str = "fast") -> np.ndarray:
    out = np.empty((size, size, 3), np.uint8)
    open_image(data, mode).crop(box, out)
    return out


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the mean absolute difference, in levels from 0 to 255."""
    return float(np.abs(a.astype(float) - b).mean())


@st.composite
def rectangles(draw, most: int = 90):
    """Draws height and width of an image, and a rectangle in it."""
    height, width = draw(st.integers(1, most)), draw(st.integers(1, most))
    left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    return (
        height,
        width,
        Box(left, top, draw(st.integers(left + 1, width)), draw(st.integers(top + 1, height))),
    )


jpegs = st.fixed_dictionaries(
    dict(
        sampling=st.sampled_from(sorted(SAMPLING)),
        progressive=st.booleans(),
        quality=st.sampled_from((5, 50, 90, 100)),
        restart=st.sampled_from((0, 1, 7)),
    )
)


@needs_extension
@settings(deadline=None, max_examples=200)
@given(rectangles(), jpegs, st.integers(0, 9))
def test_rectangle_of_a_jpeg_has_the_exact_pixels_of_the_whole(rectangle, options, seed):
    height, width, box = rectangle
    data = jpeg(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8), **options
    )
    region = open_image(data).region(box, size=max(height, width))
    np.testing.assert_array_equal(region, whole(data)[box.top : box.bottom, box.left : box.right])


@needs_extension
@settings(deadline=None, max_examples=50)
@given(rectangles(), jpegs)
def test_whole_jpeg_is_pillows_up_to_rounding(rectangle, options):
    data = jpeg(natural(*rectangle[:2]), **options)
    np.testing.assert_allclose(whole(data), shown(data).astype(int), atol=2)


@needs_extension
@pytest.mark.parametrize("first", ["42", "24", "44", "31", "22", "12"])
@pytest.mark.parametrize("shrink", [1, 2, 4, 8])
def test_rectangle_of_a_jpeg_of_any_sampling_is_a_part_of_the_whole(first, shrink):
    """Few encoders write these sampling factors, and libjpeg-turbo crops some of them wrongly."""
    data = sampled(natural(160, 192), int(first[0]), int(first[1]))
    box = Box(72, 40, 168, 120)
    region = open_image(data).region(box, size=80 // shrink)
    expected = resize_area(shown(data)[box.top : box.bottom, box.left : box.right], shrink)
    assert region.shape == expected.shape
    # Most of the difference is colour, which is stored at lower resolution.
    assert difference(region, expected) < 5


def sampled(pixels: np.ndarray, horizontal: int, vertical: int) -> bytes:
    """Returns a JPEG with chroma subsampling by these factors, composed of three grey JPEGs."""
    planes = []
    for plane in Image.fromarray(pixels).convert("YCbCr").split():
        size = (
            (-(-plane.width // horizontal), -(-plane.height // vertical)) if planes else plane.size
        )
        planes.append(encode(plane.resize(size, Image.Resampling.BOX), mode="L", quality=90))
    parts = {marker: planes[0][start:end] for marker, start, end in segments(planes[0])}
    height, width = pixels.shape[:2]
    factors = bytes((1, horizontal * 16 + vertical, 0, 2, 0x11, 0, 3, 0x11, 0))
    frame = b"\x08" + height.to_bytes(2, "big") + width.to_bytes(2, "big") + b"\x03" + factors
    tables = b"".join(
        planes[0][start:end] for marker, start, end in segments(planes[0]) if marker == 0xC4
    )
    data = b"\xff\xd8" + parts[0xE0] + parts[0xDB] + segment(0xC0, frame) + tables
    for number, plane in enumerate(planes):  # Each plane is a separate scan.
        start, end = next((start, end) for marker, start, end in segments(plane) if marker == 0xDA)
        scan = bytearray(plane[start:end])
        scan[5] = number + 1
        data += scan
    return data + b"\xff\xd9"


def resize_area(pixels: np.ndarray, shrink: int) -> np.ndarray:
    height, width = pixels.shape[0] // shrink, pixels.shape[1] // shrink
    return pixels.reshape(height, shrink, width, shrink, 3).mean((1, 3))


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("shrink", [2, 4, 8, 16])
def test_shrunk_rectangle_is_near_the_area_average_and_in_its_place(mode, progressive, shrink):
    data = jpeg(natural(512, 768), progressive=progressive)
    box = Box(128, 64, 640, 448)
    region = open_image(data, mode).region(box, size=384 // shrink)
    full = shown(data)[box.top : box.bottom, box.left : box.right]
    assert difference(region, resize_area(full, shrink)) < 2
    moved = np.roll(shown(data), shrink // 2, axis=1)[box.top : box.bottom, box.left : box.right]
    # A shift by half a pixel is detected.
    assert difference(region, resize_area(moved, shrink)) > 10


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("sampling", ["444", "420"])
def test_fast_crop_is_near_the_exact_one(seed, sampling):
    data = jpeg(natural(200 + 8 * seed, 400 - 5 * seed, seed), sampling)
    box = Box(seed, 99 - seed, 301 - 4 * seed, 200 + 7 * seed)
    fast, exact = (crop(data, box, 48, mode) for mode in ("fast", "exact"))
    assert difference(fast, exact) < 2


@needs_extension
@settings(deadline=None, max_examples=300)
@given(rectangles(), st.integers(1, 70))
def test_fast_crop_is_the_region_resized_up_to_rounding(rectangle, size):
    height, width, box = rectangle
    data = encode(picture(height, width))
    resized = np.empty((size, size, 3), np.uint8)
    resize(open_image(data).region(box, size), resized)
    assert np.abs(crop(data, box, size).astype(int) - resized).max() <= 2


@needs_extension
@pytest.mark.parametrize("orientation", range(1, 9))
def test_fast_crop_of_a_turned_picture_is_upright(orientation):
    data = encode(natural(90, 130), quality=95, exif=exif(orientation))
    box = Box(10, 20, 70, 80)
    assert difference(crop(data, box, 40), crop(shown(data), box, 40)) < 2


@settings(deadline=None, max_examples=200)
@given(rectangles(), st.integers(1, 40))
def test_fast_and_exact_are_halved_equally_often_and_not_below_the_size(rectangle, size):
    height, width, box = rectangle
    data = encode(picture(height, width))
    fast, exact = (open_image(data, mode).region(box, size) for mode in ("fast", "exact"))
    assert fast.shape == exact.shape
    # Incomplete cells of pixels at the edge of the image are omitted.
    assert fast.shape[0] >= min(box.height, size) - 1 and fast.shape[1] >= min(box.width, size) - 1


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_rectangle_of_a_turned_picture_is_one_of_the_upright_picture(orientation, mode):
    data = encode(natural(61, 83), quality=95, exif=exif(orientation))
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    opened = open_image(data, mode)
    assert (opened.height, opened.width) == upright.shape[:2]
    box = Box(5, 9, 38, 44)
    np.testing.assert_allclose(opened.region(box, 90), upright[9:44, 5:38].astype(int), atol=2)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_shrunk_rectangle_of_a_turned_picture_is_in_its_place(orientation):
    data = encode(natural(256, 320), quality=95, exif=exif(orientation))
    box = Box(64, 32, 192, 224)
    fast, exact = (open_image(data, mode).region(box, 32) for mode in ("fast", "exact"))
    assert difference(fast, exact) < 1.5


@pytest.mark.parametrize(
    "case",
    [case for case in corpus() if isinstance(case.expected, np.ndarray)],
    ids=lambda case: case.name,
)
def test_whole_image_equals_pillows(case):
    np.testing.assert_array_equal(decode(case.data), case.expected)


@pytest.mark.parametrize("progressive", [False, True])
def test_exact_crop_is_pillows_picture_resized(progressive):
    data = jpeg(natural(50, 70), progressive=progressive)
    expected = np.empty((32, 32, 3), np.uint8)
    resize(shown(data)[4:44, 3:43], expected)
    np.testing.assert_array_equal(crop(data, Box(3, 4, 43, 44), 32, "exact"), expected)


@settings(deadline=None, max_examples=50)
@given(rectangles(), st.integers(1, 40))
def test_without_the_extension_fast_is_exact(rectangle, size):
    height, width, box = rectangle
    data = encode(picture(height, width))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_jpeg", None)
        assert not is_fast()
        region = open_image(data).region(box, size)
    np.testing.assert_array_equal(region, open_image(data, "exact").region(box, size))


def test_an_array_is_its_own_pixels():
    pixels = picture()
    np.testing.assert_array_equal(
        open_image(pixels).region(Box(10, 20, 30, 50), 100), pixels[20:50, 10:30]
    )


def test_sixteen_bit_grey_keeps_its_brightness():
    data = encode(Image.fromarray(np.array([[0, 32768, 65535]], np.uint16)), "PNG", "I;16")
    assert decode(data)[0, :, 0].tolist() == [0, 128, 255]
