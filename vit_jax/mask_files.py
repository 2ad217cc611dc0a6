"""Writes masks of a folder's images, overlays and a page that shows them."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

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
LEAST_SHARE = 0.005  # Minimum share of an image's pixels for a class to be listed.


def new_folder(name: str, overwrite: bool) -> Path:
    """Returns the folder of `--out`.

    Raises:
      UserError: it is a file; it contains files, and `overwrite` is False; or its parent does not
        exist.
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
    """Returns the path of each mask in its folder, without suffix.

    The path is relative to the common folder of all images. The suffix is kept if two images would
    otherwise have the same path.
    """
    absolute = [os.path.abspath(path) for path in paths]
    common = os.path.commonpath([os.path.dirname(path) for path in absolute])
    named = [os.path.relpath(path, common) for path in absolute]
    stems = [os.path.splitext(name)[0] for name in named]
    counts = Counter(stems)
    return [stem if counts[stem] == 1 else name for stem, name in zip(stems, named, strict=True)]


def write_masks(
    folder: Path,
    segmenter: Segmenter,
    images: ImageFiles,
    log: Callable[[str], None],
    on_mask: Callable[[str, list[tuple[str, float]]], None],
) -> int:
    """Writes the masks of images, overlays and a page; returns the number of images that were read.

    A mask is a PNG of the image's size; its pixels are the classes, with VOC's palette. An overlay
    is a JPEG. Images are read one after another, so memory does not grow with their number.

    Args:
      folder: `masks/`, `overlays/` and `index.html` are written to it.
      segmenter: the segmenter.
      images: the images.
      log: callback for messages on images that cannot be read.
      on_mask: called with the path of each image and its classes with their shares of the pixels,
        the largest first.

    Raises:
      UserError: no image can be read.
    """
    names = mask_names([images.path(index) for index in range(len(images))])
    segments, num_read = Segments(segmenter.class_names), 0

    def skip(index: int, error: Unreadable | OSError) -> None:
        log(f"unreadable image skipped: {images.describe(index)} ({why_unreadable(error)})")

    for index, mask in segmenter.stream(images, skip):
        num_read += 1
        image = decode(images[index].image)
        save_image(palette_image(mask), folder / MASKS / f"{names[index]}.png")
        save_image(Image.fromarray(overlay(image, mask)), folder / OVERLAYS / f"{names[index]}.jpg")
        shares = class_shares(mask, segmenter.class_names)
        on_mask(images.describe(index), shares)
        if len(segments) < MOST_SHOWN:
            segments.add(images.describe(index), image, [mask], shares_in_words(shares))
    if not num_read:
        raise UserError(f"none of the {len(images)} files is an image that can be read")
    note = "images, and their classes"
    if num_read > MOST_SHOWN:
        note = f"the first {MOST_SHOWN} {note}; the others are in {MASKS} and {OVERLAYS}"
    values = dict(title=f"{num_read:,} segmented images", segments=segments.values(note))
    write_text(folder / PAGE, render("masks.html", **values))
    return num_read


def class_shares(mask: np.ndarray, class_names: Sequence[str]) -> list[tuple[str, float]]:
    """Returns the classes of a mask with their shares of its pixels, the largest first."""
    shares = np.bincount(mask.reshape(-1), minlength=len(class_names)) / mask.size
    order = np.argsort(-shares, kind="stable").tolist()
    listed = [(as_text(str(class_names[label])), float(shares[label])) for label in order]
    return [(name, share) for name, share in listed if share >= LEAST_SHARE] or listed[:1]


def shares_in_words(shares: Sequence[tuple[str, float]]) -> str:
    """Returns classes with their shares in percent, separated by two spaces."""
    return "  ".join(f"{name} {share:.1%}" for name, share in shares)


def save_image(image: Image.Image, file: Path) -> None:
    """Writes an image atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    image.save(temporary, {".png": "PNG", ".jpg": "JPEG"}[file.suffix], quality=90)
    temporary.replace(file)
