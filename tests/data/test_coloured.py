"""Composed images with named colours and rotations; training excludes some combinations."""

import numpy as np
import pytest

from vit_jax.data.kept_images import kept_images
from vit_jax.data.sources import SOURCES, open_source
from vit_jax.data.sources.coloured import COLOURS, HELD_OUT, TURNS
from vit_jax.errors import UserError


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Sets a new folder for the image cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_images.cache_clear()
    yield
    kept_images.cache_clear()


def opened(split="train[:2000]", collection="digits", size=32, **options):
    return open_source("coloured", split, path=collection, image_size=size, **options)


def pairs_of(split):
    """Returns the combinations of digit and colour in a split, from the names of its classes."""
    source = opened(split)
    names = {source.class_names[label] for label in source.known_labels()[:, 0]}
    return {(name.split()[1], name.split()[0]) for name in names}


def test_pairs_of_digit_and_colour_in_test_are_in_no_other_split():
    train, dev, test = (pairs_of(split) for split in ("train[:2000]", "dev", "test"))
    assert train == dev and not train & test
    assert len(train | test) == 10 * len(COLOURS) and len(test) == 10 * len(COLOURS) // HELD_OUT
    # Training contains each digit and each colour.
    assert {digit for digit, _ in train} == {*"0123456789"}
    assert {colour for _, colour in train} == {*COLOURS}


def test_caption_is_the_class_of_the_image():
    source = opened("test[:40]", fields=("text",))
    for index in range(40):
        (label,) = source[index].labels
        assert source.known_labels()[index, 0] == label
        assert source.fields_of(index) == {"text": (f"a {source.class_names[label]}",)}
    assert source.class_names == opened("train[:1]").class_names
    assert SOURCES["coloured"].counts("digits") == (10_000_000, len(source.class_names))
    assert source.fields_of(0)["text"] == ("a red 0 turned left",)


@pytest.mark.parametrize("split", ["train[:200]", "test[:100]"])
def test_object_has_the_named_colour(split):
    source = opened(split, size=48)
    palette = np.array([*COLOURS.values()])
    for index in range(0, len(source), 7):
        shown = source.objects(index)
        pixels = source[index].image[shown.seen == shown.main].astype(float)
        # The median ignores the mixed pixels at the edges.
        distances = np.abs(palette - np.median(pixels, axis=0)).sum(1)
        name = source.class_names[source.labels_of(index)[0]]
        assert [*COLOURS][distances.argmin()] == name.split()[0]


def test_object_is_turned_as_named():
    source = opened("train[:2000]", size=48)
    angles = {turn: [] for turn in TURNS}
    for index in range(len(source)):
        name = source.class_names[source.labels_of(index)[0]]
        if name.split()[1] == "1":
            rows, columns = np.nonzero(source.objects(index).seen == 0)
            covariance = np.cov(columns, -rows)
            # The angle between the longest axis and the vertical, positive to the right.
            x, y = np.linalg.eigh(covariance)[1][:, 1]
            angles[name.split(maxsplit=2)[2]].append(np.degrees(np.arctan(x / y)))
    left, upright, right = (np.median(angles[turn]) for turn in TURNS)
    assert -60 < left < upright - 15 and upright + 15 < right < 60


def test_names_of_the_classes_are_of_any_collection():
    source = opened("train[:10]", "greek", size=16)
    assert len(source.class_names) == 32 * len(COLOURS) * len(TURNS)
    assert source[3].image.shape == (16, 16, 3)


def test_masks_are_refused():
    with pytest.raises(UserError, match="coloured images have no mask: use data.source=scattered"):
        opened(fields=("mask",))
