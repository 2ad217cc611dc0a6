"""Variables of the template `viewer.html`, which shows attention maps over photographs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.inspection.map_sheet import MapSheets
from vit_jax.inspection.page_images import SMALL, colours_address, image_address, levels_address

PHOTOGRAPH = 640  # Longest side on the page, in pixels.


class View(NamedTuple):
    """A kind of map in the page's menu, such as the mean of the heads, or tokens as colours.

    Attributes:
      value: name of the kind: `mean`, `head`, `rollout` or `colours`.
      caption: text of the menu item.
      index: index of the map in the argument `colours` of `viewer`; None: an attention map.
    """

    value: str
    caption: str
    index: int | None = None


def viewer(
    images: np.ndarray,
    names: Sequence[str],
    sheets: MapSheets | None,
    colours: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Returns the variable `viewer` of `viewer.html`.

    Args:
      images: photographs, uint8 `[images, height, width, 3]`.
      sheets: attention maps of all photographs; None: the model has none.
      colours: a dict from captions to coloured maps, such as the principal components of the
        tokens as RGB. The maps are `[images, rows, columns, 3]` in 0 ... 1.
    """
    return {
        "layers": json.dumps([row._asdict() for row in sheets.rows] if sheets else []),
        "ratio": f"{images.shape[2] / images.shape[1]:.3f}",
        "small": max(images.shape[1:3]) <= SMALL,
        "views": _views(sheets, colours),
        "last_layer": len(sheets.rows) if sheets else 0,
        "heads": sheets.rows[-1].heads if sheets else 0,
        "cards": [
            _card(number, *card, sheets, [maps[number] for maps in colours.values()])
            for number, card in enumerate(zip(images, names, strict=True))
        ],
    }


def _views(sheets: MapSheets | None, colours: Iterable[str]) -> list[View]:
    views = [View("mean", "mean of heads"), View("head", "one head")] if sheets else []
    views += [View("rollout", "rollout")] if sheets and sheets.rollout else []
    return views + [View("colours", caption, index) for index, caption in enumerate(colours)]


def _card(
    number: int,
    image: np.ndarray,
    name: str,
    sheets: MapSheets | None,
    colours: Sequence[np.ndarray],
) -> dict[str, Any]:
    """Returns the template's data for one photograph: its attention maps and its other maps.

    `over` is shown if JavaScript is disabled: the last attention map, or else the first of
    `colours`.
    """
    pictures = [colours_address(picture) for picture in colours]
    peaks = [float(f"{peak:.3g}") for peak in sheets.peaks[number]] if sheets else []
    return {
        "name": name,
        "peaks": json.dumps(peaks),
        "photograph": image_address(image, PHOTOGRAPH),
        "over": levels_address(sheets.last_map(number)) if sheets else pictures[0],
        "sheet": levels_address(sheets.pixels[number]) if sheets else "",
        "colours": pictures,
    }
