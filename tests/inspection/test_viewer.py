"""Tests of the attention viewer: the maps equal the attention, and the page has its controls."""

import base64
import io
import json
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image

from vit_jax.inspection import map_sheet
from vit_jax.inspection.html_page import render
from vit_jax.inspection.map_sheet import LayerMaps, map_sheets
from vit_jax.inspection.viewer import viewer

IMAGES, LAYERS, HEADS, GRID = 2, 3, 2, (4, 5)
NAMES = ['cat_"one"_<script>alert(1)</script>.jpg', "<img src=x onerror=alert(1)>"]


def random_maps(layers=LAYERS, heads=HEADS, grid=GRID, rollout=True) -> list[LayerMaps]:
    generator = np.random.default_rng(0)
    drawn = generator.exponential(size=(layers, heads + 1, IMAGES, *grid)) ** 2
    drawn = drawn / drawn.sum(axis=(-2, -1), keepdims=True)
    return [
        LayerMaps(number, maps[:heads].swapaxes(0, 1), maps[heads] if rollout else None)
        for number, maps in enumerate(drawn, start=1)
    ]


class Elements(HTMLParser):
    """The start tags of a page with their attributes, and the text in each `label`."""

    def __init__(self, text: str):
        super().__init__()
        self.found, self.labels, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag == "label":
            self.labels.append("")
        self.open.append(tag)

    def handle_data(self, data):
        if self.labels and "label" in self.open:
            self.labels[-1] += data

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def of(self, tag: str, **attributes) -> list[dict]:
        return [
            found
            for name, found in self.found
            if name == tag and all(found.get(key) == value for key, value in attributes.items())
        ]


def pixels_of(address: str) -> np.ndarray:
    """Returns the levels of an image with a palette, or the colours of another image."""
    return np.asarray(
        Image.open(io.BytesIO(base64.b64decode(address.removeprefix("data:image/png;base64,"))))
    )


def shown(maps=None, colours=None) -> str:
    images = np.random.default_rng(1).integers(256, size=(IMAGES, 80, 100, 3), dtype=np.uint8)
    colours = (
        {"tokens as colours": np.random.default_rng(2).random((IMAGES, *GRID, 3))}
        if colours is None
        else colours
    )
    sheets = map_sheets(maps) if maps else None
    return render("viewer.html", viewer=viewer(images, NAMES, sheets, colours))


def test_embedded_maps_equal_the_attention_up_to_half_a_level():
    """The page has the maps of all heads, their mean and the rollout.

    A map's largest value is computed from the numbers in the page.
    """
    maps, elements = random_maps(), Elements(shown(random_maps()))
    rows = json.loads(elements.of("div", **{"class": "attention"})[0]["data-layers"])
    sheets, cards = (
        elements.of("img", **{"class": "sheet"}),
        elements.of("label", **{"class": "card"}),
    )
    for image, (sheet, card) in enumerate(zip(sheets, cards, strict=True)):
        levels, peaks = pixels_of(sheet["src"]), json.loads(card["data-peaks"])
        for row, layer in zip(rows, maps, strict=True):
            expected = [*layer.heads[image], layer.heads[image].mean(axis=0), layer.rollout[image]]
            for index, values in enumerate(expected):
                left, top = index * row["columns"], row["top"]
                tile = levels[top : top + row["rows"], left : left + row["columns"]]
                assert tile.max() == 255
                # The page's numbers have three digits.
                peak = peaks[row["first"] + index] * values.mean()
                np.testing.assert_allclose(peak, values.max(), rtol=0.006)
                np.testing.assert_allclose(
                    tile / 255 * values.max(), values, atol=values.max() / 509
                )


def test_without_scripts_rollout_is_over_each_photograph():
    maps, elements = random_maps(), Elements(shown(random_maps()))
    for image, over in enumerate(elements.of("img", **{"class": "over"})):
        last = maps[-1].rollout[image]
        np.testing.assert_array_equal(pixels_of(over["src"]), np.round(255 * last / last.max()))
        assert "hidden" not in over
    (controls,) = elements.of("div", **{"class": "controls"})
    assert "hidden" in controls


def test_palette_is_inferno_with_an_opacity_of_the_levels_root():
    sheet = Elements(shown(random_maps())).of("img", **{"class": "sheet"})[0]["src"]
    encoded = base64.b64decode(sheet.partition(",")[2])
    made = Image.open(io.BytesIO(encoded))
    levels, colours = np.asarray(made), np.asarray(made.convert("RGBA"))
    expected = colormaps["inferno"](levels, bytes=True)[..., :3].astype(int)
    assert np.abs(colours[..., :3] - expected).max() <= 2
    np.testing.assert_array_equal(colours[..., 3], np.round(255 * np.sqrt(levels / 255)))


def test_page_has_labelled_sliders_and_escaped_names():
    elements = Elements(shown(random_maps(), {"<b>": np.zeros((IMAGES, 1, 1, 3))}))
    sliders = {found["name"]: found for found in elements.of("input", type="range")}
    limits = {name: (found["min"], found["max"], found["value"]) for name, found in sliders.items()}
    assert limits == {
        "layer": ("1", "3", "3"),
        "head": ("1", "2", "1"),
        "strength": ("0", "100", "60"),
    }
    assert elements.labels == [
        "mean of heads",
        "one head",
        "rollout",
        "<b>",
        "Layer",
        "Head",
        "Strength",
        *NAMES,
    ]
    assert [found["alt"] for found in elements.of("img", **{"class": "photograph"})] == ["", *NAMES]
    assert not elements.of("script") and not elements.of("b")
    assert not [
        attributes
        for _, attributes in elements.found
        if any(key.startswith("on") for key in attributes)
    ]


def test_model_without_attention_has_its_colours_and_no_sliders_of_heads():
    elements = Elements(shown())
    assert [found["name"] for found in elements.of("input", type="range")] == ["strength"]
    assert elements.labels[:2] == ["tokens as colours", "Strength"]
    expected = np.round(255 * np.random.default_rng(2).random((IMAGES, *GRID, 3)))
    for kind in ("over", "colours"):
        for found, colours in zip(elements.of("img", **{"class": kind}), expected, strict=True):
            np.testing.assert_array_equal(pixels_of(found["src"]), colours)


@pytest.mark.parametrize(
    ("most", "numbers"), [(1400, [*range(1, 8)]), (1399, [1, 3, 5, 7]), (799, [1, 4, 7]), (1, [7])]
)
def test_page_has_fewer_layers_if_the_maps_are_too_large(most, numbers, monkeypatch):
    """A layer has 200 pixels: 2 images, 5 tiles each (3 heads, mean, rollout), 20 patches each."""
    monkeypatch.setattr(map_sheet, "MOST_PIXELS", most)
    assert [row.number for row in map_sheets(random_maps(layers=7, heads=3)).rows] == numbers


def test_maps_of_many_patches_are_averaged():
    (layer,) = random_maps(layers=1, grid=(128, 96))
    sheets = map_sheets([layer])
    assert sheets.pixels.shape == (IMAGES, 64, (HEADS + 2) * 64)
    mean = np.random.default_rng(3).random((1, 1, 128, 64))
    (tile,) = map_sheets([LayerMaps(1, mean)]).pixels[:, :, :64]
    expected = mean.reshape(64, 2, 64).mean(axis=1)
    np.testing.assert_allclose(tile / 255, expected / expected.max(), atol=0.003)


def test_a_page_is_no_larger_than_its_maps_pixels():
    """The maps are noise, which is hard to compress. Base64 takes at most 4/3 bytes per pixel."""
    maps = random_maps(layers=6, heads=6, grid=(37, 37))
    pixels = 6 * 8 * 37 * 37
    for sheet in Elements(shown(maps)).of("img", **{"class": "sheet"}):
        assert len(sheet["src"]) < 4 / 3 * pixels + 3000


def test_attention_that_is_not_finite_is_dark():
    values = np.full((1, 1, 2, 2), np.nan)
    values[..., 0, 0] = 1
    sheets = map_sheets([LayerMaps(1, values)])
    np.testing.assert_array_equal(sheets.pixels[0], [[255, 0, 255, 0], [0, 0, 0, 0]])
    assert np.isfinite(sheets.peaks).all()
