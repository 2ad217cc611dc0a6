"""Writes predicted masks of images, overlays, and a page with the overlays."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit_jax.data.decode import Unreadable, decode, why_unreadable
from vit_jax.data.image_files import ImageFiles
from vit_jax.errors import UserError, as_text
from vit_jax.inspection.class_maps import Segments, overlay, palette_image
from vit_jax.inspection.html_page import render, write_text
from vit_jax.models.dense.segmenter import Segmenter

MASKS, OVERLAYS, PAGE = "masks", "overlays", "index.html"
MOST_SHOWN = 100  # Maximum number of images on the page.
LEAST_SHARE = 0.005  # A class is listed if it has at least this share of the image's pixels.


def new_folder(name: str, overwrite: bool) -> Path:
    """Checks the folder of the flag `--out`, and returns its path. The folder is not created.

    Raises:
      UserError: `name` is a file; or the folder contains files and `overwrite` is False; or its
        parent folder does not exist.
    """
    folder = Path(name).expanduser()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out={name} is a file: masks are written to a folder")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise UserError(f"{folder} exists and has files; give --overwrite or another --out")
    if not folder.parent.is_dir():
        raise UserError(f"there is no folder {folder.parent} for --out={name}")
    return folder


def mask_names(paths: Sequence[str]) -> list[str]:
    """Returns the path of each image's mask in the folder of masks, without the suffix `.png`.

    The mask's path is the image's path, relative to the common folder of all images. The image's
    suffix is removed: the mask of `cats/a.jpg` is `cats/a`. Suffixes are only kept if the paths of
    several images differ in nothing else, such as `a.jpg` and `a.png`. If another image is named
    `a.png.jpg`, all suffixes are kept.
    """
    absolute = [os.path.abspath(path) for path in paths]
    common = os.path.commonpath([os.path.dirname(path) for path in absolute])
    named = [os.path.relpath(path, common) for path in absolute]
    stems = [os.path.splitext(name)[0] for name in named]
    counts = Counter(stems)
    short = [stem if counts[stem] == 1 else name for stem, name in zip(stems, named, strict=True)]
    return short if len({*short}) == len({*named}) else named


def predicted(
    stream: Callable[..., Iterable[tuple[int, Any]]],
    images: ImageFiles,
    log: Callable[[str], None],
) -> Iterator[tuple[int, str, Any]]:
    """Yields index, mask's name and prediction of readable images; raises UserError if none."""
    names, index = mask_names([images.path(index) for index in range(len(images))]), None

    def skip(index: int, error: Unreadable | OSError) -> None:
        log(f"unreadable image skipped: {images.describe(index)} ({why_unreadable(error)})")

    for index, prediction in stream(images, skip):
        yield index, names[index], prediction
    if index is None:
        raise UserError(f"none of the {len(images)} files is an image that can be read")


def write_masks(
    folder: Path,
    segmenter: Segmenter,
    images: ImageFiles,
    log: Callable[[str], None],
    report: Callable[[str, str], None],
) -> int:
    """Writes the masks of images, overlays and a page; returns the number of images that were read.

    A mask is a PNG with the image's size and VOC's palette. Its pixels are the indices of the
    classes. An overlay is a JPEG. Images are read one after another, so the memory does not depend
    on their number.

    Args:
      folder: folder into which `masks/`, `overlays/` and `index.html` are written.
      report: callback that receives the path of each image and a description of its classes.

    Raises:
      UserError: no image can be read.
    """
    segments, written = Segments(segmenter.class_names), []
    for index, name, mask in predicted(segmenter.stream, images, log):
        written.append(name)
        image = decode(images[index].image)
        save_image(palette_image(mask), folder / MASKS / f"{name}.png")
        save_image(Image.fromarray(overlay(image, mask)), folder / OVERLAYS / f"{name}.jpg")
        words = shares_in_words(class_shares(mask, segmenter.class_names))
        report(images.describe(index), words)
        if len(segments) < MOST_SHOWN:
            segments.add(images.describe(index), image, [mask], words)
    remove_earlier(folder, written, {MASKS: ".png", OVERLAYS: ".jpg"})
    num_read, note = len(written), "images, and their classes"
    if num_read > MOST_SHOWN:
        note = f"the first {MOST_SHOWN} {note}; the others are in {MASKS} and {OVERLAYS}"
    values = dict(title=f"{num_read:,} segmented images", segments=segments.values(note))
    write_text(folder / PAGE, render("masks.html", **values))
    return num_read


def class_shares(mask: np.ndarray, class_names: Sequence[str]) -> list[tuple[str, float]]:
    """Returns the classes of a mask: (class, share of the pixels), the largest share first."""
    shares = np.bincount(mask.reshape(-1), minlength=len(class_names)) / mask.size
    order = np.argsort(-shares, kind="stable").tolist()
    listed = [(as_text(str(class_names[label])), float(shares[label])) for label in order]
    return [(name, share) for name, share in listed if share >= LEAST_SHARE] or listed[:1]


def shares_in_words(shares: Sequence[tuple[str, float]]) -> str:
    """Returns a text with classes and their shares in percent, separated by two spaces."""
    return "  ".join(f"{name} {share:.1%}" for name, share in shares)


def remove_earlier(folder: Path, written: Collection[str], suffixes: Mapping[str, str]) -> None:
    """Removes an earlier prediction's files that the present prediction did not write.

    A file is only removed if all folders contain it. Other files, such as the user's own masks, are
    kept.

    Args:
      written: names of the images whose files were written, as returned by `mask_names`.
      suffixes: suffix of the files by folder in `folder`. An image has a file in each of them.
    """
    found = [
        {
            path.relative_to(folder / name).with_suffix("")
            for path in files_in(folder / name, suffix)
        }
        for name, suffix in suffixes.items()
    ]
    for stem in set.intersection(*found) - {*map(Path, written)}:
        for name, suffix in suffixes.items():
            (folder / name / f"{stem}{suffix}").unlink()


def files_in(folder: Path, suffix: str) -> Iterator[Path]:
    """Yields the files with the given suffix below a folder, without hidden files."""
    paths = folder.rglob(f"*{suffix}")
    return (path for path in paths if path.is_file() and not path.name.startswith("."))


def save_image(image: Image.Image, file: Path) -> None:
    """Writes an image atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    image.save(temporary, {".png": "PNG", ".jpg": "JPEG"}[file.suffix], quality=90)
    temporary.replace(file)
