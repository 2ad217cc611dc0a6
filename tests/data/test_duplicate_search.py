"""The search for near-duplicates finds edited copies, and ignores images that are only similar."""

import csv

import numpy as np
import pytest
from PIL import Image

from tests.data.test_duplicates import EDITS, jpeg, scene
from vit_jax.data.sources.base import Example, Source
from vit_jax.data.sources.digits import digits
from vit_jax.errors import UserError
from vit_jax.preparation import duplicate_search
from vit_jax.preparation.duplicate_search import find_pairs, groups, leak_note, leaks, look
from vit_jax.preparation.duplicates_page import find_duplicates, place_of, write_duplicates
from vit_jax.spreadsheet import ENCODING


class Images(Source):
    """A source of images in memory, as arrays or encoded."""

    class_names = ()

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return Example(self.images[index], ())

    def describe(self, index):
        return f"image {index}"


def found(images) -> list[tuple[int, int]]:
    return [(first, second) for first, second, _ in find_pairs(look(Images(images))).tolist()]


def test_each_edited_copy_is_a_pair_with_its_original():
    scenes = [scene(seed) for seed in range(12)]
    edited = [edit(image) for image, edit in zip(scenes, EDITS.values(), strict=False)]
    mirrored = [scenes[10][:, ::-1], scenes[11][:, ::-1]]
    expected = [(k, 12 + k) for k in range(len(edited))] + [
        (10, 12 + len(edited)),
        (11, 13 + len(edited)),
    ]
    pairs = found(scenes + edited + mirrored)
    assert {*pairs} <= {*expected} and len(pairs) >= len(
        expected
    ) - 1  # One in thirty fingerprints of edited copies may be too different.


def test_images_that_are_only_roughly_similar_are_no_pairs():
    """3,326 pairs of digits have similar fingerprints, but only two files are nearly the same."""
    source = digits("train")
    assert len(find_pairs(look(source))) <= 1
    copies = Images([source[index].image for index in [*range(200), 7]])
    assert find_pairs(look(copies)).tolist() == [(7, 200, 1.0)]


def test_files_of_the_same_content_are_pairs_even_if_they_have_no_fingerprint():
    flat = jpeg(np.full((40, 40, 3), 90, np.uint8))
    assert found([flat, jpeg(scene(0)), flat, flat, b"no image"]) == [(0, 2), (0, 3)]


def test_number_of_pairs_is_limited_to_the_nearest(monkeypatch):
    monkeypatch.setattr(duplicate_search, "_MOST_PAIRS", 100)
    noise = np.random.default_rng(0)
    near = [
        np.clip(scene(0) + noise.normal(0, size, scene(0).shape), 0, 255).astype(np.uint8)
        for size in np.linspace(0, 8, 40)
    ]
    assert 0 < len(found(near)) <= 100


def test_groups_are_the_images_that_pairs_connect():
    pairs = np.array([(1, 4, 1.0), (4, 2, 0.99), (0, 6, 0.98)], duplicate_search.PAIR)
    assert [group.tolist() for group in groups(pairs, 7)] == [[1, 2, 4], [0, 6]]


@pytest.fixture(scope="module")
def splits():
    """Returns training images, and test images that were partly copied from them.

    Test images 0 and 3 are a training image. Test image 1 is an edited one. Test image 4 cannot be
    decoded.
    """
    train = [jpeg(scene(seed)) for seed in range(6)]
    edited = EDITS["JPEG 30"](scene(2)[:, ::-1])
    return Images([*train, train[5]]), Images(
        [train[5], jpeg(edited), jpeg(scene(9)), train[5], b"no image"]
    )


def test_leaks_are_test_images_with_duplicates_in_training(splits):
    pairs, compared = leaks(*splits)
    assert {(ours, theirs) for ours, theirs, _ in pairs} == {(5, 0), (5, 3), (2, 1)}
    assert [value == 1 for *_, value in pairs] == [True, True, False] and compared == (7, 4)
    note = leak_note(*splits, "test")
    assert note.startswith(
        "3 of 4 test images have near-duplicates among the training images, such as image 0"
    )
    assert "\n" not in note and "and image 5: " in note


def test_splits_without_leaks_have_no_note(splits):
    train, test = splits
    assert (
        leak_note(train, Images(test.images[2:3]), "test")
        == leak_note(train, Images([]), "dev")
        == ""
    )


def test_leaks_take_bounded_time(splits, monkeypatch):
    monkeypatch.setattr(duplicate_search, "_PART", 2)
    assert leaks(*splits, seconds=0).compared == (2, 2)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("photos/Training/cat/more/1.jpg", ("train", "cat")),
        ("photos/cat/1.jpg", ("", "cat")),
        ("photos/val/1.jpg", ("val", "")),
        ("photos/1.jpg", ("", "")),
    ],
)
def test_folders_name_the_split_and_the_class(path, place):
    assert place_of(path, "photos/") == place


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Returns the report of a folder, and the folder.

    It has near-duplicates in several splits, of several classes, and within one class.
    """
    folder = tmp_path_factory.mktemp("photos")
    small = EDITS["quarter"]
    for path, image in {
        "train/cat/0.png": scene(0),
        "train/cat/0b.png": small(scene(0)),
        "train/cat/1.png": scene(1),
        "train/dog/1.png": small(scene(1)),
        "train/dog/2.png": scene(2),
        "test/cat/3.png": scene(3),
        "test/dog/=2.png": scene(2)[:, ::-1],
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / path)
    (folder / "test" / "dog" / "broken.png").write_bytes(b"no image")
    made = find_duplicates([str(folder)], 0.98, lambda line: None)
    write_duplicates(made, folder / "out", 0.98)
    return made, folder


def test_table_lists_each_image_with_its_duplicate(report):
    made, folder = report
    with (folder / "out" / "duplicates.csv").open(encoding=ENCODING, newline="") as file:
        rows = list(csv.DictReader(file))
    short = [
        (
            row["group"],
            row["kind"],
            row["split"],
            row["class"],
            row["file"].removeprefix(f"{folder}/"),
        )
        for row in rows
    ]
    assert short == [
        ("1", "in several splits", "test", "dog", "test/dog/=2.png"),
        ("1", "in several splits", "train", "dog", "train/dog/2.png"),
        ("2", "of several classes", "train", "cat", "train/cat/1.png"),
        ("2", "of several classes", "train", "dog", "train/dog/1.png"),
        ("3", "in one split and class", "train", "cat", "train/cat/0.png"),
        ("3", "in one split and class", "train", "cat", "train/cat/0b.png"),
    ]
    assert [row["similar_to"] for row in rows[::2]] == [row["file"] for row in rows[1::2]]
    assert min(float(row["similarity"]) for row in rows) > 0.98
    assert (
        made.unreadable == 1
        and str(made) == "6 of 8 images are near-duplicates of others, in 3 groups"
    )


def test_page_shows_groups_the_most_serious_first(report):
    page = (report[1] / "out" / "duplicates.html").read_text()
    kinds = ("In several splits", "Of several classes", "In one split and one class")
    places = [page.index(f"<h2>{kind}") for kind in kinds]
    assert places == sorted(places) and page.count("<img") == 6 and page.count('class="group"') == 3


def test_page_escapes_class_names(tmp_path):
    for name in ("a", "<script>b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.fromarray(scene(0)).save(tmp_path / "photos" / name / "0.png")
    made = find_duplicates([str(tmp_path / "photos")], 0.98, lambda line: None)
    write_duplicates(made, tmp_path / "out", 0.98)
    page = (tmp_path / "out" / "duplicates.html").read_text()
    assert "<b>&lt;script&gt;b, " in page and "<script" not in page


def test_several_folders_are_splits(report):
    folder = report[1]
    made = find_duplicates([f"{folder}/train", f"{folder}/test"], 0.98, lambda line: None)
    assert [group.kind for group in made.groups][:2] == ["in several splits", "of several classes"]
    assert {place.split for place in made.places} == {f"{folder}/train", f"{folder}/test"}


def test_classes_of_a_csv_are_not_cut_off_at_a_comma(report):
    file = report[1] / "commas.csv"
    file.write_text("file,label\ntrain/cat/1.png,cat, tabby\ntrain/dog/1.png,dog, boxer\n")
    with pytest.raises(UserError, match="row 2 has 3 cells"):
        find_duplicates([str(file)], 0.98, lambda line: None)


def test_a_csv_names_splits_and_classes(report):
    folder = report[1]
    rows = [
        ("train/cat/1.png", "tabby", "Training"),
        ("train/dog/1.png", "boxer", "train"),
        ("train/dog/2.png", "boxer", "train"),
        ("test/dog/=2.png", "boxer", "test"),
    ]
    file = folder / "list.csv"
    file.write_text("file,label,split\n" + "".join(f"{','.join(row)}\n" for row in rows))
    made = find_duplicates([str(file)], 0.98, lambda line: None)
    assert [group.kind for group in made.groups] == ["in several splits", "of several classes"]
    assert made.places == [
        ("train", "tabby"),
        ("train", "boxer"),
        ("train", "boxer"),
        ("test", "boxer"),
    ]
    file.write_text("".join(f"{name}\n" for name, *_ in rows))
    made = find_duplicates([str(file)], 0.98, lambda line: None)
    assert {group.kind for group in made.groups} == {"in one split and class"} and len(
        made.source
    ) == 4
