"""Images that a user gives by paths, folders or patterns."""

import os

import numpy as np
import pytest
from PIL import Image

from tests.data.test_sources import no_regular_files
from vit_jax.data.image_files import find_images, read_images
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources import open_source


@pytest.fixture
def photos(tmp_path):
    for name in ("b.png", "a.jpg", "2021/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (9, 7)).save(tmp_path / name)
    return tmp_path


def paths(*arguments) -> list[str]:
    found = find_images([str(argument) for argument in arguments])
    return [found.path(index) for index in range(len(found))]


def test_irregular_files_are_named_and_do_not_block(photos, capsys):
    bad = no_regular_files(photos / "more")
    source = find_images([str(photos)])
    names, images = read_images(source, TestCrop(8, resize=8), 16)
    assert names == ["c.png", "a.jpg", "b.png"] and len(images) == 3
    said = capsys.readouterr().out.splitlines()
    assert sorted(line.split(" (")[0] for line in said) == sorted(
        f"unreadable image skipped: {path}" for path in bad
    )


def test_reason_of_a_skipped_image_is_printed(photos, capsys):
    cut = (photos / "a.jpg").read_bytes()[:-200]
    for name, content in {"cut.jpg": cut, "text.png": b"text", "link.png": None}.items():
        if content is None:
            (photos / name).symlink_to("nothing")
        else:
            (photos / name).write_bytes(content)
    read_images(find_images([str(photos)]), TestCrop(8, resize=8), 16)
    said = capsys.readouterr().out
    assert f"{photos}/link.png (No such file or directory)" in said
    assert f"{photos}/text.png (not one of the formats JPEG, PNG, WEBP, GIF, BMP)" in said
    assert "truncated" in said.split("cut.jpg (")[1].lower()
    assert "object at 0x" not in said


def test_names_that_are_no_utf_8_can_be_opened_and_written(photos):
    os.rename(photos / "b.png", os.fsencode(photos) + b"/\xe9.png")
    found = find_images([str(photos)])
    names, _ = read_images(found, TestCrop(8, resize=8), 16)
    assert sorted(names) == ["\\udce9.png", "a.jpg", "c.png"]
    assert os.fsencode(photos) + b"/\xe9.png" in [os.fsencode(found.path(i)) for i in range(3)]


def test_pattern_finds_the_same_images_as_its_folder(photos):
    no_regular_files(photos)
    by_pattern = paths(photos / "*.jpg")
    assert by_pattern == [path for path in paths(photos) if path.endswith(".jpg")]


def test_links_to_a_folder_above_are_followed_once(photos):
    whole = paths(photos)
    (photos / "2021" / "up").symlink_to("..")
    (photos / "2021" / "again").symlink_to("..")
    assert paths(photos) == whole


def test_linked_folder_is_searched(photos, tmp_path_factory):
    album = tmp_path_factory.mktemp("album")
    (album / "photos").symlink_to(photos)
    assert [os.path.relpath(path, album) for path in paths(album)] == [
        "photos/2021/c.png",
        "photos/a.jpg",
        "photos/b.png",
    ]


def test_selected_images_of_a_folder_are_from_several_classes(tmp_path):
    for shade, name in enumerate("abcd"):
        for index in range(5):
            file = tmp_path / "test" / name / f"{name}{index}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((4, 4, 3), shade, np.uint8)).save(file)
    names, images = read_images(
        open_source("folder", "test", path=str(tmp_path)), TestCrop(4, resize=4), 4
    )
    assert sorted(name[0] for name in names) == list("abcd")
    assert sorted(images[:, 0, 0, 0].tolist()) == [0, 1, 2, 3]
