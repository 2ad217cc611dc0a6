"""Slices are representative samples of any source, and the same on all machines."""

import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_jax.data.sources import open_source
from vit_jax.data.sources.base import Subset
from vit_jax.data.sources.slices import absolute, cut, split_range, stratified
from vit_jax.errors import UserError

CLASSES, EACH = 100, 20
ROOT = Path(__file__).parents[2]
PAGES = "\n".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
# The slices in examples of README and docs, the slices of configs, and the halves, tenths and
# quarters of papers.
SLICES = sorted(
    {*re.findall(r"\b(?:train|all)(?:\[-?\d*%?:-?\d*%?\])+", PAGES)}
    - {"train[:9000000]", "train[:30000000]"}
    | {"train[:99%]", "train[99%:]", "train[:98%]", "train[98%:]", "train[:90%]", "train[90%:]"}
    | {
        "all[:80%][:90%]",
        "all[:80%][90%:]",
        "train[:1000]",
        "train[1000:]",
        "train[-25%:]",
        "train[40%:55%]",
    }
    | {"train[:37]", "all[:80%]", "all[80%:]", "all"}
)


PINNED = ["c/16.jpg", "c/25.jpg", "a/2.jpg", "c/27.jpg", "c/17.jpg", "b/6.jpg"]


def make_folder(root: Path, counts: dict[str, int]) -> Path:
    for name, images in counts.items():
        (root / name).mkdir(parents=True)
        for index in range(images):
            (root / name / f"{index}.jpg").touch()
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns a folder of empty files, which are enough for tests of labels."""
    root = tmp_path_factory.mktemp("folder")
    make_folder(root / "train", {f"class{number:03}": EACH for number in range(CLASSES)})
    return root


def open_slice(folder: Path, split: str, **options):
    path = folder / "train" if split.startswith("all") else folder
    return open_source("folder", split, path=str(path), **options)


@pytest.mark.parametrize("split", SLICES)
def test_each_class_of_a_folders_slice_is_within_one_image_of_its_share(folder, split):
    source = open_slice(folder, split)
    counts = np.bincount(source.label_table()[:, 0], minlength=CLASSES)
    assert np.abs(counts - len(source) / CLASSES).max() < 1
    assert len({source.describe(index) for index in range(len(source))}) == len(source)


def test_slices_of_slices_share_the_images_that_a_test_split_leaves(folder):
    def images(split: str) -> set[str]:
        source = open_slice(folder, split)
        return {source.describe(index) for index in range(len(source))}

    train, dev, test = map(images, ("all[:80%][:90%]", "all[:80%][90%:]", "all[80%:]"))
    assert (len(train), len(dev), len(test)) == (1440, 160, 400)
    assert train | dev == images("all[:80%]") and train | dev | test == images("all")


@pytest.mark.slow
def test_images_of_a_class_are_a_random_sample_of_it(folder):
    numbers = [int(Path(open_slice(folder, "train[:50%]").describe(i)).stem) for i in range(1000)]
    # The mean of half of the numbers 0 to 19 of each class has a standard deviation of 0.13.
    assert abs(np.mean(numbers) - 9.5) < 0.65 and set(numbers) == set(range(EACH))


def test_slice_is_the_same_for_a_copy_in_another_place_and_order(tmp_path, monkeypatch):
    counts = {"b": 7, "a": 5, "c": 30}
    make_folder(tmp_path / "one" / "train", counts)
    make_folder(tmp_path / "other" / "train", dict(reversed(counts.items())))
    listed, scandir = [], os.scandir

    class Backwards(list):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    for place in ("one", "other"):
        source = open_source("folder", "train[:40%]", path=str(tmp_path / place))
        listed.append(
            [os.path.relpath(source.describe(i), tmp_path / place) for i in range(len(source))]
        )
        monkeypatch.setattr(os, "scandir", lambda where: Backwards(list(scandir(where))[::-1]))
    assert listed[0] == listed[1]
    # The order must not depend on the machine or NumPy's version, so it is compared with stored
    # names.
    assert [name.removeprefix("train/") for name in listed[0][:6]] == PINNED


def test_unsliced_folder_is_in_the_order_of_its_paths(folder):
    source = open_slice(folder, "train")
    assert source.label_table()[:, 0].tolist() == [
        label for label in range(CLASSES) for _ in range(EACH)
    ]
    names = [source.describe(index) for index in range(len(source))]
    assert names == sorted(names)


def test_slices_without_labels_are_those_with_them(folder):
    with_labels, without = (
        open_slice(folder, "train[:30%]", labels=labels) for labels in (True, False)
    )
    assert without.class_names == ()
    images = [[source.describe(i) for i in range(len(source))] for source in (with_labels, without)]
    assert images[0] == images[1]


def test_slice_without_a_class_lists_it(tmp_path):
    make_folder(tmp_path / "train", {"common": 40, "rare": 1})
    parts = [
        open_source("folder", split, path=str(tmp_path)) for split in ("train[:50%]", "train[50%:]")
    ]
    assert sorted(part.empty_classes for part in parts) == [(), ("rare",)]
    assert Subset(parts[0], range(len(parts[0]))).empty_classes == parts[0].empty_classes
    some = [
        open_source("folder", split, path=str(tmp_path), only=("rare", "common"))
        for split in ("train[:50%]", "train[50%:]")
    ]
    assert sorted(part.empty_classes for part in some) == [(), ("rare",)]


def test_mixture_is_sliced_part_by_part_and_names_the_classes_it_lacks(tmp_path):
    make_folder(tmp_path / "a" / "train", {"cat": 30, "dog": 10})
    make_folder(tmp_path / "b" / "train", {"dog": 20, "owl": 1})
    parts = (f"folder:{tmp_path / 'a'}", f"folder:{tmp_path / 'b'}")
    halves = [
        open_source("mixture", split, parts=parts, class_names=("ant", "cat", "dog", "owl"))
        for split in ("train[:50%]", "train[50%:]")
    ]
    for half in halves:
        assert sorted(half.sizes) in ([10, 20], [11, 20])
        counts = Counter(half.labels_of(index)[0] for index in range(len(half)))
        assert counts[1] == 15 and abs(counts[2] - 15) <= 1
        assert half.label_table().tolist() == [
            list(half.labels_of(index)) for index in range(len(half))
        ]
    assert sorted(half.empty_classes for half in halves) == [("ant",), ("ant", "owl")]


def test_synthetic_images_are_cut_too():
    parts = [
        open_source("synthetic", split, num_classes=3) for split in ("train[:75%]", "train[75%:]")
    ]
    assert [len(part) for part in parts] == [48, 16]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.data())
def test_any_slice_of_any_strata_is_fair(counts, data):
    strata = np.repeat(np.arange(len(counts)), counts)
    order = stratified(strata, [str(index) for index in range(len(strata))])
    assert sorted(order.tolist()) == list(range(len(strata)))
    start = data.draw(st.integers(0, len(strata)))
    stop = data.draw(st.integers(start, len(strata)))
    found = np.bincount(strata[order[start:stop]], minlength=len(counts))
    share = np.array(counts) * (stop - start) / len(strata)
    assert np.abs(found - share).max() < (1 if len(set(counts)) == 1 else 2)


@given(
    st.integers(1, 500), st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=3)
)
def test_slices_are_cut_as_pythons_lists_are(images, pieces):
    split, expected = "name", list(range(images))
    for start, stop in pieces:
        split += f"[{start}:{stop}]"
        expected = expected[start:stop]
    if expected:
        assert list(split_range(split, images)) == expected
    else:
        with pytest.raises(UserError, match="is empty"):
            split_range(split, images)


@pytest.mark.parametrize(
    "split", ["train[:10x]", "train[5", "train[:5]x", "train]", "train[:5]+test", "[:5]]"]
)
def test_invalid_slices_are_named(split):
    with pytest.raises(UserError, match="cannot read the split") as error:
        split_range(split, 10)
    assert repr(split) in str(error.value)


def test_slices_that_tfds_does_not_support_are_converted_to_numbers():
    sizes = {"train": 100, "test": 10}
    assert absolute("train[:80%][90%:]+test[5:]", sizes) == "train[72:80]+test[5:10]"
    assert cut("train+test", "[:90%]") == "train[:90%]+test[:90%]"
    with pytest.raises(UserError, match="no split 'dev'; there are: train, test"):
        absolute("dev[:5][:2]", sizes)


def hashed_files(path, split, **options):
    """Returns the files in a hashed slice of a folder, as paths below it."""
    source = open_source("folder", split, path=str(path), slices="hashed", **options)
    return {source.describe(index).removeprefix(f"{path}/") for index in range(len(source))}


def test_images_stay_in_their_hashed_slice_when_others_are_added(tmp_path):
    def add(numbers):
        for name in ("ant", "bee"):
            (tmp_path / name).mkdir(exist_ok=True)
            for number in numbers:
                (tmp_path / name / f"{number}.png").touch()

    splits = ("all[:60%]", "all[60%:-20%]", "all[-20%:]")
    add(range(0, 200, 2))
    before = [hashed_files(tmp_path, split) for split in splits]
    add(range(200))
    after = [hashed_files(tmp_path, split) for split in splits]
    assert all(old < new for old, new in zip(before, after, strict=True))
    # Every image is in exactly one slice.
    assert sum(map(len, after)) == len(set.union(*after)) == 400
    # A binomial number is within 5 standard deviations of its mean.
    for files, share in zip(after, (0.6, 0.2, 0.2), strict=True):
        assert abs(len(files) - 400 * share) < 5 * (400 * share * (1 - share)) ** 0.5
    assert after[0] == hashed_files(tmp_path, "all[:-40%]")
    nested = [hashed_files(tmp_path, f"all[:60%]{piece}") for piece in ("[:90%]", "[90%:]")]
    assert nested[0] | nested[1] == after[0] and not nested[0] & nested[1]


def test_a_group_is_in_one_hashed_slice(tmp_path):
    (tmp_path / "all").mkdir()
    for patient in range(30):
        for number in range(4):
            (tmp_path / "all" / f"p{patient}_{number}.png").touch()
    options = dict(groups="p[0-9]+", labels=False)
    parts = [hashed_files(tmp_path, split, **options) for split in ("all[:50%]", "all[50%:]")]
    patients = [{re.search("p[0-9]+", file)[0] for file in part} for part in parts]
    assert not patients[0] & patients[1] and len(patients[0] | patients[1]) == 30


def test_hashed_slices_that_cannot_be_cut_are_one_line(tmp_path):
    (tmp_path / "ant").mkdir()
    (tmp_path / "ant" / "0.png").touch()
    with pytest.raises(UserError, match=r"in percent only, not 'all\[:1\]'; write all\[:90%\]"):
        hashed_files(tmp_path, "all[:1]")
    with pytest.raises(UserError, match="of 1 images is empty: data.slices='hashed' draws"):
        hashed_files(tmp_path, "all[:0%]")
    with pytest.raises(UserError, match="needs image files with paths, or groups"):
        open_source("digits", "train[:50%]", slices="hashed")
    with pytest.raises(UserError, match="'hashed' is unsupported with scattered"):
        open_source("scattered", "train[:50%]", path="digits", slices="hashed")
