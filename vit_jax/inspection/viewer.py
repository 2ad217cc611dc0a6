"""Images under heat maps of which a click chooses one, as HTML without a script."""

import html
import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import cv2
import numpy as np

from vit_jax.inspection.figures import HEAT
from vit_jax.inspection.html_page import inline

MOST_SIDE = 320  # Pixels of an image on the page.


class View(NamedTuple):
    """Something to lay over each image.

    Attributes:
      name: stands on its button.
      maps: `[images, rows, columns]`, drawn as heat, each by its largest; or `[images, rows, columns, 3]` of
        colours in 0 ... 1, in the image's place; None: nothing is laid over it.
    """

    name: str
    maps: np.ndarray | None = None


def viewer(images: np.ndarray, names: Sequence[str], views: Mapping[str, Sequence[View]]) -> str:
    """The images with all views laid over them, of which the first is seen at first.

    Args:
      images: uint8 `[images, height, width, 3]`.
      views: in rows of buttons, by what stands before a row.
    """
    flat = [view for row in views.values() for view in row]
    numbers = iter(range(len(flat)))
    rows = "".join(
        f"<div><span>{html.escape(before)}</span>"
        + "".join(_button(next(numbers), view.name) for view in row)
        + "</div>"
        for before, row in views.items()
    )
    rules = [f".viewer .heat {{ opacity: {HEAT}; }}"]
    for number, view in enumerate(flat):
        chosen = f".viewer:has(#view{number}:checked)"
        rules.append(f"{chosen} .view{number} {{ display: block; }}")
        if view.maps is not None and view.maps.ndim == 3:
            rules.append(f"{chosen} .base {{ filter: grayscale(1); }}")
    named = enumerate(zip(images, names, strict=True))
    laid = [(number, view.maps) for number, view in enumerate(flat) if view.maps is not None]
    each = "".join(_stack(image, name, {n: maps[i] for n, maps in laid}) for i, (image, name) in named)
    style = "<style>\n" + "\n".join(rules) + "\n</style>"
    return f'{style}<div class="viewer"><fieldset>{rows}</fieldset><div class="each">{each}</div></div>'


def _button(number: int, name: str) -> str:
    chosen = " checked" * (number == 0)
    return f'<label><input type="radio" name="view" id="view{number}"{chosen}>{html.escape(name)}</label>'


def _stack(image: np.ndarray, name: str, maps: Mapping[int, np.ndarray]) -> str:
    """An image with all maps over it by their views' numbers, none of which is seen but the chosen one."""
    over = "".join(
        f'<img class="over view{number}{" heat" * (each.ndim == 2)}" alt="" src="{heat_address(each)}">'
        for number, each in maps.items()
    )
    name = html.escape(name, quote=True)
    small = ' style="image-rendering:pixelated"' if max(image.shape) <= 64 else ""
    base = f'<img class="base" alt="{name}"{small} src="{image_address(image)}">'
    return f'<figure><div class="stack">{base}{over}</div><figcaption>{name}</figcaption></figure>'


def heat_address(values: np.ndarray) -> str:
    """The address of a picture of a `View`'s map of one image, which a page contains.

    It has a pixel for each patch; the browser draws them larger, and smoothly.
    """
    if values.ndim == 3:
        return inline(_png((255 * values).round().astype(np.uint8)))
    share = np.clip(values / max(float(values.max()), 1e-12), 0, 1)
    heat = cv2.applyColorMap((255 * share).round().astype(np.uint8), cv2.COLORMAP_INFERNO)[..., ::-1]
    return inline(_png(np.ascontiguousarray(heat)))


def image_address(pixels: np.ndarray) -> str:
    """The address of an image, `[height, width, 3]`, which a page contains."""
    from PIL import Image

    if max(pixels.shape) <= 64:
        return inline(_png(pixels))
    made, encoded = Image.fromarray(pixels), io.BytesIO()
    made.thumbnail((MOST_SIDE, MOST_SIDE))
    made.save(encoded, "JPEG", quality=88)
    return inline(encoded.getvalue(), "jpeg")


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    return encoded.getvalue()
