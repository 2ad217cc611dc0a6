"""Damaged, unusual and malicious images have the right pixels or raise `Unreadable`.

No other outcome is allowed: no messages, hangs or excessive memory.
"""

import contextlib
import faulthandler
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.conftest import HANG
from tests.data.malformed import EITHER, UNREADABLE, corpus, encode, exif, picture
from vit_jax.data.decode import Unreadable
from vit_jax.data.preprocess import TestCrop, TrainCrop

SIZE, RESIZE = 24, 32
# The largest mean difference of levels from 0 to 255. Dithered images need this limit; rotated or
# mirrored images have at least 40.
LIMIT = 12
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")


@pytest.fixture(autouse=True)
def no_hang():
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def all_of_it(image: bytes, mode: str, interpolation: str = "bilinear") -> np.ndarray:
    return TrainCrop(SIZE, "none", mode=mode, interpolation=interpolation)(
        image, np.random.default_rng(0)
    )


def centre(image: bytes, mode: str, interpolation: str = "bilinear") -> np.ndarray:
    return TestCrop(SIZE, "short_side", RESIZE, mode=mode, interpolation=interpolation)(image)


def reference(crop, pixels: np.ndarray, interpolation: str) -> np.ndarray:
    """Crops and resizes with Pillow.

    The bicubic result must be equal. The bilinear one is similar for smooth images.
    """
    height, width = pixels.shape[:2]
    if interpolation == "bicubic":
        short = min(height, width)
        rows, columns = (
            (RESIZE * height // short, RESIZE * width // short) if crop is centre else (SIZE, SIZE)
        )
        resized = Image.fromarray(pixels).resize((columns, rows), Image.Resampling.BICUBIC)
        left, top = round((columns - SIZE) / 2), round((rows - SIZE) / 2)
        return np.asarray(resized.crop((left, top, left + SIZE, top + SIZE)))
    if crop is centre:
        side = max(1, round(min(height, width) * SIZE / RESIZE))
        left, top = round((width - side) / 2), round((height - side) / 2)
        pixels = pixels[top : top + side, left : left + side]
    return np.asarray(Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BILINEAR))


@pytest.mark.one_variant
@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("case", corpus(), ids=lambda case: case.name)
def test_crop_has_the_right_pixels_or_the_image_is_unreadable(case, mode):
    for crop, interpolation in itertools.product((all_of_it, centre), ("bilinear", "bicubic")):
        how = mode, interpolation
        if isinstance(case.expected, np.ndarray):
            off = np.abs(
                crop(case.data, *how) - reference(crop, case.expected, interpolation).astype(int)
            )
            assert off.mean() < LIMIT, (crop.__name__, interpolation)
        elif case.expected == UNREADABLE:
            with pytest.raises(Unreadable):
                crop(case.data, *how)
        else:
            assert case.expected == EITHER
            with contextlib.suppress(Unreadable):
                pixels = crop(case.data, *how)
                assert pixels.shape == (SIZE, SIZE, 3) and pixels.dtype == np.uint8


CHILD = """
import json, resource, sys
import numpy as np
from vit_jax.data.decode import Unreadable
from vit_jax.data.preprocess import TestCrop, TrainCrop
from tests.data.malformed import corpus, encode, picture

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

corpus(), encode(picture(3000, 3000)), TrainCrop(32, mode="exact")(picture(), np.random.default_rng(0))
before, unreadable = peak(), 0
for case in corpus():
    for mode in ("fast", "exact"):
        try:
            TrainCrop(32, mode=mode)(case.data, np.random.default_rng(0))
            TestCrop(32, resize=40, mode=mode, interpolation="bicubic")(case.data)
        except Unreadable:
            unreadable += 1
print(json.dumps({"megabytes": peak() - before, "unreadable": unreadable}))
"""


@pytest.mark.slow
def test_no_image_prints_hangs_or_takes_much_memory():
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["unreadable"] >= 200
    assert found["megabytes"] < 300  # The largest image that is decoded has 9 million pixels.


WHOLE = (
    encode(picture(), exif=exif(6)),
    encode(picture(), progressive=True, subsampling="4:4:4"),
    encode(picture(), "PNG"),
    encode(picture(), "PNG", "P"),
    encode(picture(), "WEBP"),
    encode(picture(), "WEBP", "RGBA", lossless=True),
)


@st.composite
def changed(draw) -> bytes:
    """Draws an image with some bytes changed, inserted or deleted."""
    data = bytearray(draw(st.sampled_from(WHOLE)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(("change", "insert", "delete", "cut")))
        if kind == "cut":
            del data[place:]
            data += draw(st.sampled_from((b"", b"\xff\xd9")))
        elif kind == "delete":
            del data[place : place + draw(st.integers(1, 40))]
        else:
            new = draw(st.binary(min_size=1, max_size=6))
            data[place : place + (len(new) if kind == "change" else 0)] = new
    return bytes(data)


@pytest.mark.parametrize("mode", ["fast", "exact"])
@settings(deadline=None, max_examples=300)
@given(data=changed(), seed=st.integers(0, 99))
def test_changed_image_has_pixels_or_is_unreadable(data, mode, seed):
    with contextlib.suppress(Unreadable):
        pixels = TrainCrop(SIZE, mode=mode)(data, np.random.default_rng(seed))
        assert pixels.shape == (SIZE, SIZE, 3) and pixels.dtype == np.uint8


@settings(deadline=None, max_examples=100)
@given(
    st.binary(max_size=300),
    st.sampled_from((b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"BM")),
)
def test_noise_is_unreadable(noise, head):
    for mode in ("fast", "exact"):
        with pytest.raises(Unreadable):
            all_of_it(head + noise, mode)
