"""Draws `vit_jax/data/glyphs/glyphs.png` and glyphs.json from matplotlib's fonts.

Usage: python -m tests.data.draw_glyphs

The repository contains both files, drawn with matplotlib 3.11.2 and Pillow 13.0.0. Do not draw them
again: a different version of FreeType may draw different pixels, and the composed images that use
them must not change.
"""

import json
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image, ImageFont

from vit_jax.data.sources.composed import GLYPHS

# Oblique fonts are excluded. They are slanted copies of other fonts, and the composed images shear
# each character at random anyway.
FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
)
COMPARED = (0, 4)  # Indices of DejaVu Sans and Serif, the fonts in which characters are compared.
FEWEST_STYLES = 8  # Minimum number of different drawings of a character.
CELL = 32  # Side of a drawing in pixels.
GREYS = 4
ALIKE = 0.4  # Two different characters must differ in at least this share of their ink.
SAME = 0.08  # Drawings of a character in two fonts must differ in at least this share of their ink.
SLENDER = 3  # Characters with this aspect ratio or more are excluded.
CATEGORIES = ("Lu", "Ll", "Lo", "Nd", "Sm", "So", "Sc", "Po")
# For each collection of characters: the maximum number of characters, and the prefixes of their
# Unicode names. A character that resembles an earlier character is skipped, such as a Greek letter
# that resembles a Latin letter.
COLLECTIONS = {
    "glyphs": (200, ("LATIN", "DIGIT", "")),
    "greek": (32, ("GREEK",)),
    "cyrillic": (40, ("CYRILLIC",)),
    "armenian": (40, ("ARMENIAN",)),
    "georgian": (32, ("GEORGIAN",)),
}


def draw(character: str, font: ImageFont.FreeTypeFont) -> np.ndarray | None:
    """Draws a character, uint8 `[CELL, CELL]`; None if it is blank, or very narrow or flat."""
    mask = font.getmask(character, mode="L")
    ink = np.asarray(mask, np.uint8).reshape(mask.size[::-1])
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    if not len(rows):
        return None
    ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    height, width = ink.shape
    side = max(height, width)
    if side >= SLENDER * min(height, width):
        return None
    square = np.zeros((side, side), np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = ink
    return np.asarray(Image.fromarray(square).resize((CELL, CELL), Image.Resampling.BOX))


def differ(one: np.ndarray, others: np.ndarray, share: float) -> bool:
    """Returns True if the drawing `one` differs clearly from each of the drawings `others`.

    The sum of the pixels of a drawing is called its ink. The sum of absolute pixel differences of
    two drawings must be larger than `share` times the ink of the drawing with less ink.
    """
    return bool((np.abs(others - one).sum(1) > share * np.minimum(others.sum(1), one.sum())).all())


def distinct(drawn: list[np.ndarray | None]) -> list[np.ndarray | None]:
    """Replaces a character's drawings by None if they resemble a drawing in an earlier font."""
    kept = np.zeros((0, CELL * CELL))
    result = []
    for one in drawn:
        new = one is not None and differ(one.ravel() / 255, kept, SAME)
        kept = np.concatenate([kept, one.reshape(1, -1) / 255]) if new else kept
        result.append(one if new else None)
    return result


def script(character: str) -> str:
    """Returns the collection of a character, a key of `COLLECTIONS`, by its Unicode name."""
    name = unicodedata.name(character, "")
    for collection, (_, words) in reversed(COLLECTIONS.items()):
        if any(name.startswith(word) for word in words):
            return collection
    raise ValueError(character)


def candidates(maps: list[set[int]]) -> list[str]:
    """Returns the characters without accents that at least `FEWEST_STYLES` fonts contain.

    The characters are sorted by collection (a key of `COLLECTIONS`). In the first collection,
    `glyphs`, Latin letters and digits come before symbols.
    """
    characters = [
        character
        for character in map(chr, sorted(maps[0]))
        if sum(ord(character) in known for known in maps) >= FEWEST_STYLES
        and unicodedata.category(character) in CATEGORIES
        and not unicodedata.decomposition(character)
        and character != "\ufffd"  # Unicode's replacement character.
    ]
    plain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    order = tuple(COLLECTIONS)
    # Symbols are sorted in a scattered order. In Unicode order, long ranges of similar symbols,
    # such as arrows and boxes, would come first and fill the collection.
    spread = {
        character: (index * 0.6180339887498949) % 1 for index, character in enumerate(characters)
    }
    return sorted(
        characters, key=lambda one: (order.index(script(one)), one not in plain, spread[one], one)
    )


def choose(fonts: list, maps: list[set[int]]) -> dict[str, list[np.ndarray | None]]:
    """Chooses the characters of glyphs.png, and draws each of them in all fonts.

    A character is chosen if three conditions are met:

    - Fewer characters of its collection are chosen so far than the maximum in `COLLECTIONS`.
    - The character has at least `FEWEST_STYLES` clearly different drawings.
    - The character does not resemble a character that was chosen earlier.

    Returns:
      A dictionary from each character to its drawings by font, in the order of the image's rows.
    """
    chosen, sizes = {}, Counter()
    earlier = np.zeros((0, len(COMPARED) * CELL * CELL))
    for character in candidates(maps):
        collection = script(character)
        if sizes[collection] == COLLECTIONS[collection][0]:
            continue
        drawn = [
            draw(character, font) if ord(character) in known else None
            for font, known in zip(fonts, maps, strict=True)
        ]
        compared = [drawn[number] for number in COMPARED]
        if any(one is None for one in compared):
            continue
        ink = np.concatenate([one.ravel() / 255 for one in compared])
        drawn = distinct(drawn)
        styles = sum(one is not None for one in drawn)
        if styles < FEWEST_STYLES or not differ(ink, earlier, ALIKE):
            continue
        earlier = np.concatenate([earlier, ink[None]])
        sizes[collection] += 1
        chosen[character] = drawn
    return chosen


def save_sheet(chosen: dict[str, list[np.ndarray | None]]) -> None:
    """Writes glyphs.png: a row of drawings for each character, a column for each font."""
    empty = np.zeros((CELL, CELL), np.uint8)
    rows = [
        np.concatenate([empty if one is None else one for one in drawn], axis=1)
        for drawn in chosen.values()
    ]
    sheet = np.concatenate(rows).astype(np.uint16)
    picture = Image.fromarray(((sheet * (GREYS - 1) + 127) // 255).astype(np.uint8), "P")
    picture.putpalette([grey for step in range(GREYS) for grey in [255 * step // (GREYS - 1)] * 3])
    picture.save(GLYPHS / "glyphs.png", optimize=True, bits=2)


def main() -> None:
    """Writes glyphs.png and glyphs.json."""
    import matplotlib
    from matplotlib.ft2font import FT2Font

    files = [Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf") for name in FONTS]
    maps = [set(FT2Font(str(file)).get_charmap()) for file in files]
    fonts = [ImageFont.truetype(str(file), 160) for file in files]
    chosen = choose(fonts, maps)
    save_sheet(chosen)
    collections = dict.fromkeys(COLLECTIONS, "")
    for character in chosen:
        collections[script(character)] += character
    table = {"fonts": FONTS, "collections": collections}
    (GLYPHS / "glyphs.json").write_text(json.dumps(table, indent=1, ensure_ascii=True) + "\n")
    total = sum(one is not None for drawn in chosen.values() for one in drawn)
    print({name: len(chars) for name, chars in collections.items()}, f"{total} drawings")


if __name__ == "__main__":
    main()
