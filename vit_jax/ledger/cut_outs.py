"""Composes photographs with masks and boxes, from cut-outs (with alpha channel) and backgrounds."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit_jax.data.map_files import run_lengths
from vit_jax.data.sources.folder import IMAGE_SUFFIXES
from vit_jax.errors import UserError

BACKGROUND = "background"  # Name of the first class.
TEST_EVERY = 3  # Every third cut-out of a class and every third background are for testing.
SIDE = 336  # Side of an image, in pixels.
LENGTH = 0.35, 0.8  # Longer side of a cut-out, relative to the image's side.
MOST = 3  # Maximum number of cut-outs in an image.


def compose_all(
    stamps: Path, classes: Sequence[str], backgrounds: Path, out: Path, images: dict[str, int]
) -> None:
    """Writes composed images with masks and COCO annotations.

    Images are in `images/SPLIT`, masks in `masks/SPLIT` (with `classes.txt`), and annotations in
    `annotations/instances_SPLIT.json`. No cut-out and no background is used in both splits.

    Args:
      stamps: folder of cut-outs, with a folder for each class.
      images: number of images of each split, `train` and `test`.

    Raises:
      UserError: a class has fewer than `TEST_EVERY` cut-outs, or there are too few backgrounds.
    """
    parts = {name: split_files(stamps / name, {".png"}) for name in classes}
    grounds = split_files(backgrounds, IMAGE_SUFFIXES)
    names = [BACKGROUND, *(name.rsplit("/", 1)[-1] for name in classes)]
    out.mkdir(parents=True)
    (out / "classes.txt").write_text("\n".join(names) + "\n")
    (out / "annotations").mkdir()
    categories = [dict(id=label, name=name) for label, name in enumerate(names) if label]
    for split, count in images.items():
        for kind in ("images", "masks"):
            (out / kind / split).mkdir(parents=True)
        opened = [Image.open(file).convert("RGB") for file in grounds[split]]
        rows: dict[str, list[dict[str, Any]]] = {"images": [], "annotations": []}
        for number in range(count):
            rng = np.random.default_rng((number, split == "test"))
            image, mask, objects = compose(
                opened[int(rng.integers(len(opened)))],
                [parts[name][split] for name in classes],
                rng,
            )
            file = f"{number:05d}.jpg"
            image.save(out / "images" / split / file, quality=92)
            rows["images"].append(dict(id=number, file_name=file, height=SIDE, width=SIDE))
            rows["annotations"] += [
                annotation(mask, objects, part) | dict(image_id=number)
                for part in np.unique(objects[objects > 0]).tolist()
            ]
            Image.fromarray(mask).save(out / "masks" / split / f"{number:05d}.png")
        for number, row in enumerate(rows["annotations"], 1):
            row["id"] = number
        content = json.dumps(rows | {"categories": categories})
        (out / "annotations" / f"instances_{split}.json").write_text(content)


def annotation(mask: np.ndarray, objects: np.ndarray, part: int) -> dict[str, Any]:
    """Returns the COCO annotation of a cut-out's visible pixels, without `id` and `image_id`.

    Args:
      mask: the class of each pixel, from `compose`.
      objects: for each pixel, the number of the cut-out that covers it, from `compose`.
      part: number of the cut-out to annotate.
    """
    pixels = objects == part
    rows, columns = np.nonzero(pixels)
    left, top = int(columns.min()), int(rows.min())
    return dict(
        category_id=int(mask[rows[0], columns[0]]),
        bbox=[left, top, int(columns.max()) + 1 - left, int(rows.max()) + 1 - top],
        area=len(rows),
        segmentation=run_lengths(pixels),
        iscrowd=0,
    )


def split_files(folder: Path, suffixes: set[str] | Sequence[str]) -> dict[str, list[Path]]:
    """Returns the images below a folder by split; raises UserError for too few files."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in suffixes)
    if len(files) < TEST_EVERY:
        raise UserError(f"{folder} has {len(files)} images, and must have {TEST_EVERY} or more")
    test = files[TEST_EVERY - 1 :: TEST_EVERY]
    return {"train": [file for file in files if file not in test], "test": test}


def compose(
    background: Image.Image, cut_outs: Sequence[Sequence[Path]], rng: np.random.Generator
) -> tuple[Image.Image, np.ndarray, np.ndarray]:
    """Composes a random image.

    Args:
      background: a photograph; a random square of it is used.
      cut_outs: files of cut-outs by class; the files in `cut_outs[i]` have class i + 1.

    Returns:
      The image; the class of each pixel, uint8 `[SIDE, SIDE]`; and the number of each pixel's
      cut-out in the image, from 1, uint8 `[SIDE, SIDE]`. Class and number are 0 for the background.
    """
    shortest = min(background.size)
    side = int(rng.uniform(0.4, 1) * shortest)
    left, top = (int(rng.integers(0, length - side + 1)) for length in background.size)
    square = background.resize((SIDE, SIDE), box=(left, top, left + side, top + side))
    image, (mask, objects) = square.convert("RGBA"), np.zeros((2, SIDE, SIDE), np.uint8)
    for part in range(int(rng.integers(1, MOST + 1))):
        label = int(rng.integers(len(cut_outs)))
        file = cut_outs[label][int(rng.integers(len(cut_outs[label])))]
        layer = Image.new("RGBA", image.size)
        layer.paste(turned(Image.open(file).convert("RGBA"), rng), place(rng))
        image = Image.alpha_composite(image, layer)
        pixels = np.asarray(layer)[..., 3] > 127
        mask[pixels], objects[pixels] = label + 1, part + 1
    return image.convert("RGB"), mask, objects


def turned(cut_out: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Resizes a cut-out to a random size, and mirrors it with probability 1/2."""
    factor = rng.uniform(*LENGTH) * SIDE / max(cut_out.size)
    width, height = (max(1, round(side * factor)) for side in cut_out.size)
    resized = cut_out.resize((width, height), Image.Resampling.LANCZOS)
    return resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else resized


def place(rng: np.random.Generator) -> tuple[int, int]:
    """Returns a random position for a cut-out's top left corner, also partly outside the image."""
    return int(rng.uniform(-0.1, 0.7) * SIDE), int(rng.uniform(-0.1, 0.7) * SIDE)
