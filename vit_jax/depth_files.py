"""Writes predicted depth maps of images, coloured pictures, and a page with the pictures."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from vit_jax.data.decode import decode
from vit_jax.data.image_files import ImageFiles
from vit_jax.inspection.html_page import render, write_text
from vit_jax.inspection.page_images import image_address
from vit_jax.mask_files import MOST_SHOWN, PAGE, predicted, remove_earlier, save_image
from vit_jax.models.dense.depth_model import DepthModel
from vit_jax.models.dense.palette import coloured_depth, depth_legend

DEPTHS, COLOURS = "depth", "colours"
# Units of depth in PNG files: the size in metres, and the name. KITTI uses 1/256 m, and decimetres
# are for large distances.
UNITS = {0.001: "millimetres", 1 / 256: "1/256 m", 0.1: "decimetres"}
MOST = 2**16 - 1  # Maximum value of a pixel, in units.


def unit_of(farthest: float) -> float:
    """Returns the finest unit of `UNITS`, in metres, in which a depth in metres fits 16 bits."""
    return next(unit for unit in UNITS if farthest <= MOST * unit)


def depth_image(depth: np.ndarray, unit: float) -> Image.Image:
    """Converts depths in metres to a 16-bit grey image whose values are multiples of `unit`."""
    return Image.fromarray(np.round(depth / unit).clip(0, MOST).astype(np.uint16))


def in_colours(depth: np.ndarray) -> np.ndarray:
    """Converts depths to colours over their own range, uint8 `[height, width, 3]`."""
    return np.asarray(coloured_depth(depth, depth.min(), depth.max())).astype(np.uint8)


def write_depths(
    folder: Path,
    model: DepthModel,
    images: ImageFiles,
    log: Callable[[str], None],
    report: Callable[[str, str], None],
) -> int:
    """Writes depth maps, coloured pictures and a page; returns the number of images that were read.

    A depth map is a 16-bit grey PNG with the image's size. `unit_of` returns its unit. A coloured
    picture is a JPEG. Its colour scale spans the range of the image's depths.

    Args:
      folder: folder into which `depth/`, `colours/` and `index.html` are written.
      report: callback that receives the path of each image and a description of its depths.

    Raises:
      UserError: no image can be read.
    """
    unit, figures, written = unit_of(model.head.range[1]), [], []
    units = f"{UNITS[unit]} (config.data.depth_scale={unit:g})"
    for index, name, depth in predicted(model.stream, images, log):
        written.append(name)
        save_image(depth_image(depth, unit), folder / DEPTHS / f"{name}.png")
        colours = in_colours(depth)
        save_image(Image.fromarray(colours), folder / COLOURS / f"{name}.jpg")
        nearest, median, farthest = np.quantile(depth, (0, 0.5, 1)).tolist()
        words = f"{nearest:.2f} to {farthest:.2f} m, median {median:.2f} m"
        report(images.describe(index), words)
        if len(figures) < MOST_SHOWN:
            pictures = [*map(image_address, (decode(images[index].image), colours))]
            figures.append(dict(name=images.describe(index), pictures=pictures, caption=words))
    remove_earlier(folder, written, {DEPTHS: ".png", COLOURS: ".jpg"})
    num_read, note = len(written), f"Depth maps in {DEPTHS} are in {units}."
    log(note)
    if num_read > MOST_SHOWN:
        note += f" The first {MOST_SHOWN} images; the others are in {DEPTHS} and {COLOURS}."
    segments = dict(figures=figures, legend=depth_legend(), note=note)
    page = render("masks.html", title=f"Depth of {num_read:,} images", segments=segments)
    write_text(folder / PAGE, page)
    return num_read
