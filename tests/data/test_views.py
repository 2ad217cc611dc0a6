"""Several views of one image in a batch."""

import contextlib
import functools

import numpy as np

from vit_jax.data.pipeline import training_batches
from vit_jax.data.preprocess import TrainCrop
from vit_jax.data.sources import open_source
from vit_jax.data.views import View, flips_of, pictures_of

AREA = (0.1, 0.5)


def batch_of(views=(), **arguments):
    if views:
        crop = functools.partial(TrainCrop, area=AREA)
        arguments["views"] = pictures_of(views, lambda size, **more: crop(size, **more), 16, None)
    else:
        arguments["crop"] = TrainCrop(16, area=AREA)
    source = open_source("digits", "train[:50]")
    with contextlib.closing(
        training_batches(source, seed=3, batch_size=8, first_step=5, workers=0, threads=1, **arguments)
    ) as batches:
        return next(batches)


def test_first_view_is_the_only_views_bits_and_the_others_differ():
    alone = batch_of()
    batch = batch_of([View(), View("other"), View("locals", count=3, size=8, crop=dict(area=(0.05, 0.1)))])
    np.testing.assert_array_equal(batch["image"], alone["image"])
    np.testing.assert_array_equal(batch["labels"], alone["labels"])
    assert (batch["other"] != alone["image"]).any(axis=(1, 2, 3)).all()
    assert batch["locals"].shape == (8, 3, 8, 8, 3)
    assert (batch["locals"][:, 0] != batch["locals"][:, 1]).any(axis=(1, 2, 3)).sum() >= 7


def test_view_of_the_same_rectangle_shows_it_and_may_be_augmented_otherwise():
    invert = lambda pixels, rng: ~pixels  # noqa: E731
    batch = batch_of([View(), View("inverted", same_rectangle_as="image", augment=invert), View("other")])
    np.testing.assert_array_equal(batch["inverted"], ~batch["image"])
    np.testing.assert_array_equal(batch["other"], batch_of([View(), View("other")])["other"])


def test_views_of_one_rectangle_are_flipped_alike():
    flips = flips_of([View(), View("small", same_rectangle_as="image"), View("other")])
    assert flips["image"] == flips["small"] == "flip" != flips["other"]
