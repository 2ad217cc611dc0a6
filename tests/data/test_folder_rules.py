"""Image folders of users: unsupported formats, system files, and unusual names of splits."""

import os
from pathlib import Path

import pytest
from PIL import Image

from vit_jax.command import read_config
from vit_jax.data.image_files import find_images
from vit_jax.data.sources import open_source
from vit_jax.data.sources.folder_rules import in_words
from vit_jax.errors import UserError
from vit_jax.preparation.readers import find
from vit_jax.runs.assemble import class_count

# Suffixes of files, with Pillow's names of their formats. The formats in `OTHERS` are not decoded.
DECODED = {"jpg": "JPEG", "png": "PNG", "bmp": "BMP", "gif": "GIF", "jfif": "JPEG", "webp": "WEBP"}
OTHERS = {"tif": "TIFF", "heic": "AVIF", "ppm": "PPM"}


def save(path: Path, form: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 5), "red").save(path, form)


def pets(root: Path, *splits: str, classes=("cat", "dog")) -> Path:
    for split in splits:
        for name in classes:
            save(root / split / name / f"{name}.png")
    return root


def opened(root: Path, split: str = "train", **options):
    return open_source("folder", split, path=str(root), **options)


@pytest.fixture
def of_all_formats(tmp_path):
    for name in ("cat", "dog"):
        for suffix, form in (DECODED | OTHERS).items():
            save(tmp_path / "train" / name / f"a.{suffix}", form)
            (tmp_path / "train" / name / f"._a.{suffix}").write_bytes(b"\0\5\x16\7" + bytes(40))
        (tmp_path / "train" / name / "notes.txt").write_text("")
        save(tmp_path / "train" / name / "@eaDir" / "a.png" / "SYNOPHOTO_THUMB_M.jpg")
    save(tmp_path / "train" / "loose.png")
    save(tmp_path / "train" / "__MACOSX" / "b.png")
    return tmp_path / "train"


LEFT_OUT = {
    "AppleDouble files (._*)": 18,
    ".tif images (unsupported format)": 2,
    ".heic images (unsupported format)": 2,
    ".ppm images (unsupported format)": 2,
    ".txt files": 2,
    "files in hidden or system folders": 3,
}


def test_every_decoded_format_is_read_and_others_are_counted_by_reason(of_all_formats):
    source = opened(of_all_formats.parent)
    assert source.class_names == ("cat", "dog") and len(source) == 2 * len(DECODED)
    assert source.left_out == LEFT_OUT | {"images outside the folders of classes": 1}
    assert opened(of_all_formats.parent, "train[:50%]").left_out == source.left_out
    unlabelled = opened(of_all_formats.parent, labels=False)
    assert len(unlabelled) == 2 * len(DECODED) + 1 and unlabelled.left_out == LEFT_OUT
    assert in_words({"a": 1, "b": 2000, "c": 3}, most=2) == "2,000 b, 3 c, 1 other files"


def test_images_named_by_their_folder_follow_the_same_rules(of_all_formats):
    found = find_images([str(of_all_formats)])
    assert len(found) == 2 * len(DECODED) + 1 and found.left_out == LEFT_OUT
    assert found.note()[0].startswith(
        "note: skipped: 18 AppleDouble files (._*), 3 files in hidden"
    )


@pytest.mark.parametrize("name", ["Train", "TRAINING", "train_set", "training-images"])
def test_split_is_found_under_other_spellings(name, tmp_path):
    pets(tmp_path, name, "Test")
    assert {opened(tmp_path).describe(0)} == {f"{tmp_path}/{name}/cat/cat.png"}
    assert len(opened(tmp_path, "test")) == 2


def test_two_spellings_of_a_split_are_refused(tmp_path):
    pets(tmp_path, "Train", "training")
    with pytest.raises(
        UserError, match="has no folder train, but Train and training: choose one of them"
    ):
        opened(tmp_path)
    assert len(opened(tmp_path, "training")) == 2


def test_the_error_about_a_missing_split_explains_a_folder_without_splits(tmp_path):
    (tmp_path / "ant").mkdir()
    with pytest.raises(UserError, match=r"has: ant; all its images are the split 'all'.*all\[:80%"):
        open_source("folder", "train", path=str(tmp_path))
    (tmp_path / "test").mkdir()
    with pytest.raises(UserError, match=r"has: ant, test$"):
        open_source("folder", "train", path=str(tmp_path))


@pytest.mark.parametrize(
    "splits", [("Train", "Test"), ("training", "testing"), ("train", "val2017")]
)
def test_splits_are_no_classes_in_any_spelling(splits, tmp_path):
    pets(tmp_path, *splits)
    with pytest.raises(UserError, match="has splits, not classes"):
        opened(tmp_path, "all[:80%]")


def test_both_readings_of_split_names_among_classes_are_spelled_out(tmp_path):
    for name in ("bus", "car", "train"):
        save(tmp_path / name / "a.png")
    with pytest.raises(
        UserError,
        match=r"two ways: as the splits train with other folders next to them \(bus, car\), or "
        r"as the "
        r"classes bus, car, train; .*data.train_split=train\), for classes, list them in "
        r"data.classes",
    ):
        opened(tmp_path, "all")
    listed = opened(tmp_path, "all", only=("bus", "car", "train"))
    assert listed.class_names == ("bus", "car", "train") and len(listed) == 3
    assert len(opened(tmp_path, "train", labels=False)) == 1


@pytest.mark.parametrize(("maps", "source"), [("masks", "masks"), ("Depth", "depth")])
def test_images_with_masks_or_depths_are_no_classes(maps, source, tmp_path):
    """A classifier of images against masks would always be right."""
    for name in ("images", maps):
        save(tmp_path / "data" / name / "a.png")
        save(tmp_path / "split" / "train" / name / "a.png")
    message = rf"folders images and {maps}, and no classes: .*data.source={source} trains"
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "data", "all")
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "split", "train")
    for folder in ("data", "split"):
        with pytest.raises(UserError, match=message):
            find(str(tmp_path / folder))
    listed = opened(tmp_path / "data", "all", only=("images", maps))
    assert len(listed) == 2


def test_single_class_is_refused_and_the_advice_works(tmp_path):
    for split in ("train", "test"):
        pets(tmp_path / split, "pets")
    config = read_config("configs/quickstart.py")
    config.data.source, config.data.path = "folder", str(tmp_path)
    with pytest.raises(UserError, match="all of the class 'pets'.*data.train_split=train/pets"):
        class_count(config, opened(tmp_path))
    assert class_count(config, opened(tmp_path, "train/pets")) == 2
    (tmp_path / "train" / "owls").mkdir()
    with pytest.raises(UserError, match="all of the class 'pets'"):
        class_count(config, opened(tmp_path))


def test_names_that_are_no_utf_8_are_text_that_can_be_written(tmp_path):
    pets(tmp_path, "train")
    os.rename(tmp_path / "train" / "cat", os.fsencode(tmp_path / "train") + b"/caf\xe9")
    source = opened(tmp_path)
    assert source.class_names == ("caf\\udce9", "dog") and source[0].image[:4] == b"\x89PNG"
    assert source.describe(0).encode() == f"{tmp_path}/train/caf\\udce9/cat.png".encode()
    assert len(opened(tmp_path, class_names=source.class_names)) == 2


@pytest.mark.parametrize("layout", ["images/train", "train/images"])
def test_text_labels_of_yolo_are_no_masks(layout, tmp_path):
    images = tmp_path / layout
    labels = tmp_path / layout.replace("images", "labels")
    labels.mkdir(parents=True)
    for name in "ab":
        save(images / f"{name}.jpg")
        (labels / f"{name}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    (labels / "classes.txt").write_text("dog\n")
    words = r"has text files such as a.txt, as YOLO's labels, .* Supported: COCO files, such as "
    for kind in ("masks", "coco"):
        with pytest.raises(UserError, match=words):
            open_source(kind, "train", path=str(tmp_path), labels=False)
    with pytest.raises(UserError, match=words):
        find(str(tmp_path))
    save(labels / "a.png")
    with pytest.raises(UserError, match="1 of 2 images have no mask"):
        open_source("masks", "train", path=str(tmp_path), labels=False)
