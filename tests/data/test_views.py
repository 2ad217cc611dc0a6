"""Several views of an image in a batch."""

import contextlib
import functools
import io

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import decode
from vit_jax.data.decode import is_fast
from vit_jax.data.pipeline import training_batches
from vit_jax.data.preprocess import TrainCrop
from vit_jax.data.sources import open_source
from vit_jax.data.views import View, flips_of, view_specs

AREA = (0.1, 0.5)


def invert(pixels, rng):
    return ~pixels


def batch_of(views=(), augment=None, **arguments):
    if views:
        crop = functools.partial(TrainCrop, area=AREA)
        arguments["views"] = view_specs(views, lambda size, **more: crop(size, **more), 16, augment)
    else:
        arguments["crop"] = TrainCrop(16, area=AREA)
    source = open_source("digits", "train[:50]")
    with contextlib.closing(
        training_batches(
            source, seed=3, batch_size=8, first_step=5, workers=0, threads=1, **arguments
        )
    ) as batches:
        return next(batches)


def test_first_view_is_the_only_views_bits_and_the_others_differ():
    alone = batch_of()
    batch = batch_of(
        [View(), View("other"), View("locals", count=3, size=8, crop=dict(area=(0.05, 0.1)))]
    )
    np.testing.assert_array_equal(batch["image"], alone["image"])
    np.testing.assert_array_equal(batch["labels"], alone["labels"])
    assert (batch["other"] != alone["image"]).any(axis=(1, 2, 3)).all()
    assert batch["locals"].shape == (8, 3, 8, 8, 3)
    assert (batch["locals"][:, 0] != batch["locals"][:, 1]).any(axis=(1, 2, 3)).sum() >= 7


def test_view_of_the_same_rectangle_shows_it_and_may_be_augmented_otherwise():
    batch = batch_of(
        [View(), View("inverted", same_rectangle_as="image", augment=invert), View("other")]
    )
    np.testing.assert_array_equal(batch["inverted"], ~batch["image"])
    np.testing.assert_array_equal(batch["other"], batch_of([View(), View("other")])["other"])


def test_views_of_the_same_rectangle_are_augmented_alike():
    views = [View(), View("other"), View("again", same_rectangle_as="image")]
    batch = batch_of(views, augment=lambda pixels, rng: pixels // 2 + np.uint8(rng.integers(128)))
    np.testing.assert_array_equal(batch["again"], batch["image"])
    plain = batch_of(views)["image"]
    assert (
        len(
            {
                int((image - other // 2).max())
                for image, other in zip(batch["image"], plain, strict=True)
            }
        )
        > 4
    )


def test_each_picture_of_a_view_is_distorted_in_its_own_way():
    plain = batch_of([View(count=3), View("other")])
    batch = batch_of(
        [View(count=3, distort=(invert, None, lambda pixels, rng: pixels // 2)), View("other")]
    )
    np.testing.assert_array_equal(batch["image"][:, 0], ~plain["image"][:, 0])
    np.testing.assert_array_equal(batch["image"][:, 1], plain["image"][:, 1])
    np.testing.assert_array_equal(batch["image"][:, 2], plain["image"][:, 2] // 2)
    np.testing.assert_array_equal(batch["other"], plain["other"])


def test_distortion_comes_after_the_runs_augmentation_and_draws_after_it():
    def blacken(pixels, rng):
        return pixels * np.uint8(rng.random() < 0.5)

    views = [View(), View("other", distort=(invert,))]
    augmented = batch_of([View(), View("other")], augment=blacken)
    batch = batch_of(views, augment=blacken)
    assert {*augmented["other"].any(axis=(1, 2, 3))} == {True, False}
    np.testing.assert_array_equal(batch["image"], augmented["image"])
    np.testing.assert_array_equal(batch["other"], ~augmented["other"])


def test_view_with_distortions_for_another_number_of_pictures_is_refused():
    with pytest.raises(ValueError, match="'image' has 2 crops and 3 distortions"):
        batch_of([View(count=2, distort=(invert, invert, invert))])


@pytest.mark.skipif(not is_fast(), reason="Pillow decodes whole images")
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "area"])
@pytest.mark.parametrize("turn", [None, 6])
def test_views_of_one_jpeg_are_decoded_once_and_equal_single_views(
    monkeypatch, interpolation, turn
):
    photograph = np.random.default_rng(0).integers(256, size=(60, 80, 3), dtype=np.uint8)
    file, exif = io.BytesIO(), Image.Exif()
    if turn:
        exif[0x0112] = turn
    Image.fromarray(photograph).resize((160, 120)).save(file, "JPEG", quality=90, exif=exif)
    views = [View(count=2, crop=dict(area=(0.5, 1.0))), View("local", count=4, size=16)]
    make = functools.partial(
        TrainCrop, kind="random_resized", area=AREA, interpolation=interpolation
    )
    pictures = view_specs(views, make, 32, None)
    crops = [picture.crop for picture in pictures for _ in picture.streams]
    alone = [crop(file.getvalue(), np.random.default_rng(i)) for i, crop in enumerate(crops)]
    decoded, plain = [], decode._jpeg.decode
    monkeypatch.setattr(
        decode._jpeg, "decode", lambda *given: decoded.append(given[-1]) or plain(*given)
    )
    opened = crops[0].open(file.getvalue(), several=True)
    for i, crop in enumerate(crops):
        together = crop(opened, np.random.default_rng(i)).astype(int)
        # A single bilinear view is resized row by row while it is decoded, with other rounding
        # errors.
        assert np.abs(together - alone[i]).max() <= (2 if interpolation == "bilinear" else 0)
    assert sorted(decoded) == sorted({*decoded})  # Each size of the JPEG is decoded once.


def test_view_that_decodes_otherwise_is_refused():
    with pytest.raises(ValueError, match="'other' decodes the image otherwise"):
        batch_of([View(), View("other", crop=dict(mode="exact"))])


def test_views_of_one_rectangle_are_flipped_alike():
    flips = flips_of([View(), View("small", same_rectangle_as="image"), View("other")])
    assert flips["image"] == flips["small"] == "flip" != flips["other"]
