"""Composed images are the same on all machines; slices are nested, and splits share no parts."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest
from absl import flags

from vit_jax.data.kept_images import kept_images
from vit_jax.data.pipeline import training_batches
from vit_jax.data.preprocess import TrainCrop
from vit_jax.data.scenes import CELL, STRIDE
from vit_jax.data.sources import SOURCES, data_set, open_source
from vit_jax.data.sources.composed import COLLECTIONS, GLYPHS, LAYOUTS, parts_of
from vit_jax.data.sources.digits import digits
from vit_jax.errors import UserError

# Hashes of the first 20 training images. They must not depend on the machine or NumPy's version.
GOLDEN = {
    ("scattered", "digits", 32): "a7bc378c7a980487",
    ("scattered", "digits", 64): "d4ddf733b5d0282e",
    ("scattered", "glyphs", 32): "59008c32680116a1",
    ("scattered", "glyphs", 64): "8dd9bbb72bdf4b97",
    ("scattered", "armenian", 48): "4a21fdce3a3a203c",
    ("centred", "digits", 32): "c328beda7e2caee6",
    ("centred", "letters", 16): "97103fc6a65d6891",
    ("coloured", "digits", 32): "164ba55b04b16827",
}


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Sets a new folder for the image cache, and yields it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_images.cache_clear()
    yield tmp_path / "vit_jax"
    kept_images.cache_clear()


def opened(collection="digits", split="train", size=32, layout="scattered", **options):
    return open_source(layout, split, path=collection, image_size=size, **options)


def digest(layout: str, collection: str, size: int) -> str:
    source = opened(collection, size=size, layout=layout)
    images = np.stack([source[index].image for index in range(20)])
    return hashlib.blake2b(images.tobytes(), digest_size=8).hexdigest()


@pytest.mark.parametrize(("layout", "collection", "size"), list(GOLDEN), ids=str)
def test_images_are_these_bytes(layout, collection, size):
    assert digest(layout, collection, size) == GOLDEN[layout, collection, size]


def test_image_is_the_same_bytes_in_another_process():
    code = (
        "import sys; from vit_jax.data.sources import open_source\n"
        "sys.stdout.buffer.write(open_source('scattered', 'train', path='digits', "
        "image_size=32)[7].image)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert answer.stdout == opened()[7].image.tobytes()


@pytest.mark.slow
def test_workers_make_the_same_batches():
    flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags.

    def batches(workers):
        crop = TrainCrop(24, "random_resized", area=(0.5, 1.0))
        source = opened(split="train[:1000]", size=24)
        stream = training_batches(
            source, seed=0, batch_size=64, first_step=3, crop=crop, workers=workers, threads=1
        )
        found = [next(stream) for _ in range(2)]
        stream.close()
        return found

    for one, other in zip(batches(0), batches(1), strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])
        np.testing.assert_array_equal(one["labels"], other["labels"])


@pytest.mark.parametrize("size", [16, 17, 96, 224])
def test_images_are_of_the_size_asked_for_in_colour(size):
    for collection in COLLECTIONS:
        image = opened(collection, size=size)[3].image
        assert image.shape == (size, size, 3) and image.dtype == np.uint8
        assert len(np.unique(image.reshape(-1, 3), axis=0)) > size


def test_slices_are_nested():
    small, large = opened(split="train[:10]"), opened(split="train[:1000000]")
    assert (len(small), len(large)) == (10, 1_000_000)
    for index in (0, 4, 9):
        np.testing.assert_array_equal(small[index].image, large[index].image)
        assert small[index].labels == large[index].labels == large.labels_of(index)
    later = opened(split="train[1000:][5:]")
    np.testing.assert_array_equal(later[2].image, large[1007].image)
    assert later.describe(2) == "scattered digits train image 1007"


def test_images_of_layouts_splits_and_collections_differ():
    images = [
        opened(name, split, layout=layout)[0].image.tobytes()
        for layout in LAYOUTS
        for name in COLLECTIONS
        for split in ("train", "dev", "test")
    ]
    assert len(set(images)) == len(images)


@pytest.mark.parametrize("collection", COLLECTIONS)
def test_every_slice_has_its_share_of_each_class(collection):
    source = opened(collection, "train[37:1237]")
    counts = np.bincount(source.known_labels()[:, 0], minlength=len(source.class_names))
    assert counts.max() - counts.min() <= 1
    assert source.known_labels()[:20, 0].tolist() == [
        source[index].labels[0] for index in range(20)
    ]


@pytest.mark.parametrize("collection", COLLECTIONS)
def test_no_part_is_in_two_splits(collection):
    def drawn(split):
        parts = parts_of(collection, split)
        drawings = parts.drawings.reshape(-1, sum(parts.count) + 1, STRIDE, STRIDE)[0, :-1]
        return {drawing.tobytes() for drawing in drawings}

    train, dev, test = map(drawn, ("train", "dev", "test"))
    assert not train & dev and not train & test and not dev & test
    assert min(len(train), len(dev), len(test)) >= len(opened(collection).class_names)


def test_alphabets_have_no_character_in_common():
    alphabets = [name for name in COLLECTIONS if name not in ("digits", "letters")]
    names = [name for collection in alphabets for name in opened(collection).class_names]
    assert len(set(names)) == len(names) > 300


def test_test_digits_are_composed_of_the_test_scans():
    parts = parts_of("digits", "test")
    labels = digits("test").labels
    np.testing.assert_array_equal(parts.count, np.bincount(labels))
    shrunk = parts.drawings.reshape(-1, sum(parts.count) + 1, STRIDE, STRIDE)[2, :-1, 1:9, 1:9]
    scans = digits("test").images[np.argsort(labels, kind="stable"), :, :, 0]
    apart = [
        np.corrcoef(one.ravel(), other.ravel())[0, 1]
        for one, other in zip(shrunk, scans, strict=True)
    ]
    assert min(apart) > 0.9


def test_masks_of_objects_cover_their_pixels():
    """Without noise, each object has one colour. The median finds it in spite of the noise."""
    source = opened("glyphs", size=128)
    for index in range(12):
        image, (label,) = source[index]
        seen, labels, main = source.objects(index)
        assert seen.shape == (128, 128) and seen.dtype == np.int8
        assert labels[main] == label and seen.max() < len(labels)
        sizes = np.bincount(seen[seen >= 0], minlength=len(labels))
        assert 2 <= len(labels) <= 5 and sizes[main] > 0
        inside = image[seen == main].astype(float)
        around = image[seen == -1].astype(float)
        assert np.abs(np.median(inside, 0) - np.median(around, 0)).max() > 40


def test_scene_is_the_same_at_each_size():
    small, large = (opened("digits", size=size) for size in (48, 96))
    for index in range(10):
        one, other = small.objects(index), large.objects(index)
        assert one.labels == other.labels and one.main == other.main
        agree = one.seen == other.seen[::2, ::2]
        assert agree.mean() > 0.93
        coarse = large[index].image.reshape(48, 2, 48, 2, 3).mean((1, 3))
        assert np.abs(coarse - small[index].image).mean() < 20


def test_largest_object_is_the_main_one():
    source = opened("digits", size=64)
    for index in range(30):
        scene, _, _ = source._compose(index)
        lengths = [item.length for item in scene.items if item.label is not None]
        assert sorted(lengths)[-2] < 0.6 * max(lengths)
        assert scene.items[scene.main].length == max(lengths)


def test_centred_image_has_one_object_that_fills_it():
    source = opened("digits", size=64, layout="centred")
    for index in range(30):
        found = source.objects(index)
        rows, columns = np.nonzero(found.seen == found.main)
        assert found.labels == source.labels_of(index)
        assert max(np.ptp(rows), np.ptp(columns)) > 0.6 * 64
        assert abs(rows.mean() - 32) < 10
        assert abs(columns.mean() - 32) < 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(path="digit"), "unknown collection 'digit' .data.path.; did you mean 'digits'"),
        (dict(path=""), "there are: armenian, cyrillic, digits"),
        (dict(path="digits", image_size=15), "16 to 224 pixels, not 15"),
        (dict(path="digits", image_size=225), "16 to 224 pixels, not 225"),
        (dict(path="digits", split="val"), "no split 'val'; there are: dev, test, train"),
        (dict(path="digits", split="test[10000:]"), "empty"),
        (dict(path="digits", split="train[:x]"), "cannot read the split"),
    ],
)
def test_unknown_values_raise_a_one_line_error(options, words):
    with pytest.raises(UserError, match=words) as error:
        open_source("scattered", **{"split": "train", "image_size": 32} | options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("index", [-1, 10])
def test_index_outside_is_refused(index):
    with pytest.raises(IndexError, match=f"image {index} of 10 of scattered digits train"):
        opened(split="train[:10]")[index]


def test_collections_are_data_sets_of_their_own_names():
    described = data_set("scattered:greek@train[:100],test[:50]")
    assert (described.name, described.kind, described.path) == ("greek", "scattered", "greek")
    assert SOURCES["scattered"].counts("greek") == (10_000_000, 32)


def test_classes_can_be_chosen():
    source = open_source("scattered", "train[:100]", path="digits", image_size=16, only=("7", "2"))
    assert source.class_names == ("7", "2") and len(source) == 20
    assert {source[index].labels for index in range(20)} == {(0,), (1,)}


def test_kept_glyphs_are_small_and_of_the_fonts_named():
    table = json.loads((GLYPHS / "glyphs.json").read_text())
    assert (GLYPHS / "glyphs.png").stat().st_size <= 300_000
    assert all(name.startswith(("DejaVu", "STIX")) for name in table["fonts"])
    assert CELL == 32


def read_again(monkeypatch, split="train", size=16) -> np.ndarray:
    """Returns image 5 from a source that cannot compose images."""
    kept_images.cache_clear()  # As in another process, whose cache is empty.
    with monkeypatch.context() as nothing:
        nothing.setattr("vit_jax.data.sources.composed.draw", None)
        return opened("digits", split, size)[5].image


def test_image_is_composed_once_and_then_read(kept, monkeypatch):
    image = opened("digits", size=16)[5].image
    again = read_again(monkeypatch)
    np.testing.assert_array_equal(again, image)
    again[...] = 0  # Changes of the array, as by an augmentation, must not change the cache.
    np.testing.assert_array_equal(read_again(monkeypatch), image)
    for other in (dict(split="dev"), dict(size=17)):
        with pytest.raises(TypeError):
            read_again(monkeypatch, **other)


@pytest.mark.parametrize("damage", ["flipped bit", "cut off", "zeros"])
def test_damaged_image_is_composed_again(kept, damage, monkeypatch):
    image = opened("digits", size=16)[5].image
    (file,) = kept.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "flipped bit":
        content[5 * 772 + 100] ^= 4
    else:
        content = content[:-1] if damage == "cut off" else bytes(len(content))
    file.write_bytes(content)
    with pytest.raises(TypeError):
        read_again(monkeypatch)
    kept_images.cache_clear()
    np.testing.assert_array_equal(opened("digits", size=16)[5].image, image)
    np.testing.assert_array_equal(read_again(monkeypatch), image)


def test_without_a_folder_to_keep_images_in_they_are_composed(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert opened("digits", size=16)[5].image.shape == (16, 16, 3)


def test_kept_file_has_a_limit(kept, monkeypatch):
    monkeypatch.setattr("vit_jax.data.kept_images.MOST_BYTES", 5 * 772)
    source = opened("digits", size=16)
    for index in (4, 5):
        assert source[index].image.shape == (16, 16, 3)
    assert next(kept.iterdir()).stat().st_size == 5 * 772


@pytest.mark.parametrize("fields", [("mask",), ("boxes",), ("mask", "boxes")])
def test_masks_and_boxes_are_those_of_the_visible_objects(fields):
    plain = opened()
    for _ in range(2):  # First composed, then read from the cache.
        source = opened(fields=fields)
        first = int("mask" in fields)  # The class "background" precedes the digits.
        assert source.class_names == ("background",)[:first] + plain.class_names
        for index in range(20):
            shown, values = plain.objects(index), source.fields_of(index)
            classes = np.array([0, *(label + 1 for label in shown.labels)])
            if "mask" in fields:
                np.testing.assert_array_equal(values["mask"], classes[shown.seen + 1])
            if "boxes" in fields:
                boxes = values["boxes"]
                visible = [k for k in range(len(shown.labels)) if (shown.seen == k).any()]
                assert boxes.labels.tolist() == [shown.labels[k] + first for k in visible]
                for k, box, pixels in zip(visible, boxes.corners, boxes.masks, strict=True):
                    np.testing.assert_array_equal(pixels, shown.seen == k)
                    left, top, right, bottom = box.astype(int)
                    inside = pixels[top:bottom, left:right]
                    assert inside.sum() == pixels.sum() and inside[0].any() and inside[-1].any()
                    assert inside[:, 0].any() and inside[:, -1].any()


def test_images_with_masks_have_no_label():
    source = opened(fields=("mask",))
    assert source[3].labels == () and source.known_labels() is None
    assert opened(fields=("boxes",)).known_labels() is not None
