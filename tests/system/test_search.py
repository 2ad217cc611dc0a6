"""Search by text: images of the named colour are ranked first, and embeddings are cached."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.training.objectives.test_contrastive import COLOURS, pairs, small_config


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    config = small_config("sigmoid")
    vit_jax.train(config, folder / "run", train=pairs(96, 0), test=pairs(48, 1))
    return folder / "run"


def write_photos(folder: Path) -> None:
    folder.mkdir()
    for name, colour in COLOURS.items():
        for index in range(3):
            pixels = np.full((20, 24, 3), colour, np.uint8)
            Image.fromarray(pixels).save(folder / f"{name} <b>{index}.png")
    (folder / "notes.txt").write_text("no image")
    (folder / "broken.png").write_bytes(b"no image")


def search(run, workdir, *arguments, folder: Path, **options) -> subprocess.CompletedProcess:
    """Runs the command in a folder."""
    checkpoint = f"--checkpoint={workdir}"
    return run(checkpoint, *arguments, module="vit_jax.search", cwd=folder, **options)


def lines_of(done) -> list[tuple[float, str]]:
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(?m)^ *(-?\d\.\d{3})  (.*)$", done.stdout)
    return [(float(value), Path(path).name) for value, path in found]


def test_images_of_the_named_colour_come_first_and_are_embedded_once(run, workdir, tmp_path):
    own = dict(folder=tmp_path, XDG_CACHE_HOME=str(tmp_path))  # The cache is empty.
    photos, page = tmp_path / "photos", tmp_path / "found.html"
    write_photos(photos)
    places = photos, photos / "green <b>1.png"  # One image is also in the folder.
    first = search(run, workdir, "a green square", *places, "--top=4", f"--page={page}", **own)
    found = lines_of(first)
    assert len({name for _, name in found}) == 4
    assert [name.split()[0] for _, name in found[:3]] == ["green"] * 3
    assert [value for value, _ in found] == sorted((value for value, _ in found), reverse=True)
    assert "0 of 10 images are in the cache" in first.stdout
    assert "green &lt;" in page.read_text().replace("<wbr>", "")
    assert "<b>" not in page.read_text()

    Image.fromarray(np.full((21, 24, 3), COLOURS["red"], np.uint8)).save(photos / "green <b>0.png")
    again = search(run, workdir, "it is red", photos, "--top=5", f"--page={page}", **own)
    # All except the changed and the broken image.
    assert "8 of 10 images are in the cache" in again.stdout
    assert "green <b>0.png" in [name for _, name in lines_of(again)[:4]]

    # Only the broken image is not in the cache.
    third = search(run, workdir, "it is red", photos, "--top=5", **own)
    assert "9 of 10 images are in the cache" in third.stdout
    assert lines_of(third) == lines_of(again)


def test_files_that_are_no_images_are_one_line(run, workdir, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "broken.png").write_bytes(b"no image")
    done = search(run, workdir, "a cat", tmp_path / "photos", folder=tmp_path)
    assert done.returncode == 2
    assert "none of the 1 files is an image that can be read" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a cat"], "give --checkpoint=WORKDIR, a text"),
        (["a cat", "nowhere"], "there is no nowhere"),
        (["", "photos"], "the text is empty"),
        (["a cat", "photos", "--page=found.png"], "ends in .html"),
        (["a cat", "-"], "standard input"),
    ],
)
def test_mistakes_are_one_line(run, workdir, tmp_path, arguments, words):
    write_photos(tmp_path / "photos")
    done = search(run, workdir, *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_another_file_is_not_replaced_by_the_page(run, workdir, tmp_path):
    write_photos(tmp_path / "photos")
    (tmp_path / "mine.html").write_text("<p>mine")
    photos = tmp_path / "photos"
    done = search(run, workdir, "a cat", photos, "--page=mine.html", folder=tmp_path)
    assert done.returncode == 2
    assert "not a page of vit_jax" in done.stderr
    assert (tmp_path / "mine.html").read_text() == "<p>mine"
