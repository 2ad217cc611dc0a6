"""Random scenes of objects scattered on clutter, drawn at any image size.

A scene consists of items, from back to front: faint fragments of objects, bars, small objects, and
the main object, which defines the label. Each item is a drawing of a character or digit.

Scenes are bit-exact on any machine, because all computations use integers. Random numbers are the
raw output of Philox (Salmon et al., 2011), which is the same in all NumPy versions. Sines come from
a table of rounded values. Lengths in the image are in units of 1/65,536 of its side. Positions in a
drawing are in units of 1/256 of a pixel of the drawing.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

SIDE = 65536  # Side of an image, in units of length.
CELL = 32  # Side of a drawing, in pixels.
STRIDE = CELL + 2  # Side of a stored drawing: it has an empty border of one pixel.
LEVELS = 4  # Number of resolutions of each drawing: sides of 32, 16, 8 and 4 pixels.
LATTICE = 16  # Period of a texture, in points of its lattice.
SINES = [round(4096 * math.sin(2 * math.pi * step / 1024)) for step in range(1024 + 256)]
SINE_TABLE = np.array(SINES)

# Maximum numbers of fragments, bars and smaller objects in a scene, from back to front. The main
# object is the last or the second-to-last item.
FRAGMENTS, BARS, SMALLER = 4, 3, 4
ITEMS = FRAGMENTS + BARS + SMALLER + 1
FRAGMENT, BAR, OBJECT, MAIN = range(4)
KIND = np.array([FRAGMENT] * FRAGMENTS + [BAR] * BARS + [OBJECT] * SMALLER + [MAIN])
FIELDS = 16  # Number of random numbers for each item.
WORDS = (ITEMS + 2) * FIELDS // 2  # Number of 64-bit words; a word contains two random numbers.
LATTICE_WORDS = LATTICE * LATTICE // 8  # Number of words for the lattice, eight points in a word.

# Ranges of an item's length for each kind (fragment, bar, smaller object, main object), in 256ths
# of the main object's length.
SHARES = np.array([[180, 400], [130, 400], [60, 110], [256, 256]])
# Ranges of an item's shorter side for each kind, in 256ths of the item's length.
SLIM = np.array([[190, 256], [14, 40], [190, 256], [190, 256]])
TURN = np.array([512, 512, 50, 50])  # Maximum rotation by kind, in 1,024ths of a turn.
LEAN = 50  # Maximum shear, in 256ths.
GROUND = 10, 150  # Range of the values of the background's channels.
CONTRAST = 60, 150  # Range of an item's brightness minus the background's mean brightness.
SHIFT = 50  # Maximum difference between a channel of an item and the item's brightness.
FAINT = 40, 90  # Range of the opacity of fragments and bars, in 256ths.
TEXTURE = 60  # Maximum difference between the colours of a texture.
NOISE = 2, 16  # Range of the noise amplitude.


class Layout(NamedTuple):
    """Ranges for the size of a scene's main object and for the numbers of other items.

    Attributes:
      length: range of the main object's longer side, in units of 1/65,536 of the image's side.
      fragments, bars, smaller: ranges of the numbers of fragments, bars and smaller objects, at
        most `FRAGMENTS`, `BARS` and `SMALLER`.
    """

    length: tuple[int, int]
    fragments: tuple[int, int]
    bars: tuple[int, int]
    smaller: tuple[int, int]


class Look(NamedTuple):
    """Colour and rotation of a main object."""

    colour: tuple[int, int, int]  # Red, green and blue, from 0 to 255.
    turn: tuple[int, int]  # Range of the random clockwise rotation, in 1,024ths of a turn.


class Parts(NamedTuple):
    """The drawings of all classes; scenes are composed of them.

    Attributes:
      drawings: pixels of all drawings at all levels (resolutions), uint8 `[levels * drawings * 34 *
        34]`. Each drawing has an empty border. The last drawing of each level is solid, for bars.
      first, count: index of the first drawing, and number of drawings, of each class, int64
        `[classes]`.
    """

    drawings: np.ndarray
    first: np.ndarray
    count: np.ndarray


class Objects(NamedTuple):
    """The objects of an image, and their visible pixels."""

    # Index of the object that is visible at each pixel, int8 `[size, size]`; -1: no object.
    seen: np.ndarray
    labels: tuple[int, ...]  # Class of each object.
    main: int  # Index of the object that defines the image's class.


@dataclasses.dataclass(frozen=True)
class Item:
    """An item of a scene: an object, a fragment of an object, or a bar.

    Attributes:
      drawing: index of the item's drawing in `Parts`.
      x, y: position of the item's centre, in units of 1/65,536 of the image's side.
      length: length of the item's longer side, in the same units.
      matrix: the 2x2 matrix, row by row, that maps a square with sides of 1 to the item's
        parallelogram in the image, in the same units.
      cut: the visible part of the drawing of a fragment: left, right, top and bottom edge, in
        256ths of the drawing's side. None: the whole drawing is visible.
      label: class of an object; None for a fragment or a bar.
    """

    drawing: int
    x: int
    y: int
    length: int
    matrix: tuple[int, int, int, int]
    colour: tuple[int, int, int]
    opacity: int
    cut: tuple[int, int, int, int] | None
    label: int | None


@dataclasses.dataclass(frozen=True)
class Scene:
    """A scene: a background texture, and items in front of it, from back to front."""

    items: tuple[Item, ...]
    main: int  # Index of the item that defines the label.
    # The texture interpolates between random shades at the points of a square lattice. These are
    # the shades of the points, uint16 `[16 * 16]`.
    lattice: np.ndarray
    # Scale and rotation of the texture: a vector `(x, y)` in the lattice, in 256ths of the distance
    # of neighbouring points. A step of one image width to the right in the image is a step by this
    # vector in the lattice.
    steps: tuple[int, int]
    colours: np.ndarray  # Colours of the texture's lowest and highest shade, int32 `[2, 3]`.
    noise: int  # Amplitude of the noise.


def drawings_of(cells: np.ndarray) -> np.ndarray:
    """Computes `Parts.drawings` from the drawings of all classes.

    First a drawing is appended in which all pixels are 255; bars are drawn with it. Then each
    drawing is stored at four resolutions (levels): 32, 16, 8 and 4 pixels per side. At each level
    it is at the upper left of an array of 34 x 34 pixels, behind a border of one pixel. The border
    and all other pixels are 0.

    Args:
      cells: the drawings of all classes, uint8 `[drawings, 32, 32]`.

    Returns:
      uint8 `[levels, drawings + 1, 34, 34]`, flattened to one axis.
    """
    cells = np.concatenate([cells, np.full((1, CELL, CELL), 255, np.uint8)])
    result = np.zeros((LEVELS, len(cells), STRIDE, STRIDE), np.uint8)
    for level in range(LEVELS):
        side = cells.shape[1]
        result[level, :, 1 : side + 1, 1 : side + 1] = cells
        quarters = cells.reshape(len(cells), side // 2, 2, side // 2, 2).astype(np.uint16)
        cells = ((quarters.sum((2, 4), dtype=np.uint16) + 2) // 4).astype(np.uint8)
    return result.reshape(-1)


class _Box(NamedTuple):
    """The image pixels that an item may cover, and their mapping to the item's drawing.

    Attributes:
      top, left, height, width: rectangle of the image pixels.
      place: offset of the drawing in `Parts.drawings`.
      side: side of the drawing at the selected level, in pixels.
      across, down: linear functions from an image pixel to a column and a row of the drawing. A
        function consists of three numbers: the value at the rectangle's top left pixel, the
        increment for each pixel to the right, and the increment for each pixel down. The numbers
        are in units of 2^-20 pixels of the drawing.
    """

    top: int
    left: int
    height: int
    width: int
    place: int
    side: int
    across: tuple[int, int, int]
    down: tuple[int, int, int]

    @property
    def pixels(self) -> int:
        return self.height * self.width


def compose(
    parts: Parts, layout: Layout, label: int, key: tuple[int, int], look: Look | None = None
) -> tuple[Scene, np.random.Philox]:
    """Returns a random scene with a main object of class `label`, and the generator for its noise.

    Args:
      layout: ranges for the items.
      label: class of the main object.
      key: key of the random generator, which determines the scene.
      look: colour and rotation of the main object; None: random ones.
    """
    generator = np.random.Philox(key=np.array(key, np.uint64))
    words = generator.random_raw(WORDS + LATTICE_WORDS)
    halves = np.concatenate([words[:WORDS] >> np.uint64(32), words[:WORDS] & np.uint64(0xFFFFFFFF)])
    numbers = halves.astype(np.int64).reshape(FIELDS, ITEMS + 2)
    lattice = words[WORDS:].astype("<u8").view(np.uint8).astype(np.uint16)
    general = numbers[:, ITEMS:].reshape(-1).tolist()
    colours = np.array([_within(number, *GROUND) for number in general[:3]], np.int32)
    changes = [_within(number, -TEXTURE, TEXTURE) for number in general[3:6]]
    others = colours + np.array(changes, np.int32)
    colours = np.clip(np.stack([colours, others]), 0, 255)
    turn, zoom = _within(general[6], 0, 1023), _within(general[7], 1, 10)
    fragments, bars = _within(general[8], *layout.fragments), _within(general[9], *layout.bars)
    smaller = _within(general[10], *layout.smaller)
    above = min(_within(general[11], 0, 1), smaller)
    length = _within(general[12], *layout.length)
    ground = colours.sum(0, dtype=np.int64) >> 1
    items = _items(parts, label, numbers[:, :ITEMS], length, ground, look)
    first = FRAGMENTS + BARS
    clutter = [*range(fragments), *range(FRAGMENTS, first)[:bars]]
    objects = [*range(first, first + smaller)]
    objects.insert(smaller - above, ITEMS - 1)
    return Scene(
        items=tuple(items[number] for number in (*clutter, *objects)),
        main=len(clutter) + smaller - above,
        lattice=lattice,
        steps=(SINES[turn + 256] * zoom >> 4, SINES[turn] * zoom >> 4),
        colours=colours,
        noise=_within(general[13], *NOISE),
    ), generator


def _within(number, low, high):
    """Scales a number below 2^32 to an integer from `low` to `high`; arguments may be arrays."""
    return low + (number * (high - low + 1) >> 32)


def _items(
    parts: Parts,
    label: int,
    numbers: np.ndarray,
    main: int,
    ground: np.ndarray,
    look: Look | None,
) -> list[Item]:
    """Draws the maximum number of items of each kind; a scene uses only some of them.

    Args:
      numbers: 16 random numbers below 2^32 for each item, int64 `[16, items]`.
      main: length of the main object's longer side, in units of 1/65,536 of the image's side.
    """
    labels = numbers[0] * len(parts.first) >> 32
    labels[-1] = label
    drawing = parts.first[labels] + (numbers[1] * parts.count[labels] >> 32)
    drawing[KIND == BAR] = parts.first[-1] + parts.count[-1]
    length = main * _within(numbers[2], *SHARES.T[:, KIND]) >> 8
    shorter = length * _within(numbers[3], *SLIM.T[:, KIND]) >> 8
    upright = (numbers[4] & 1).astype(bool)
    width, height = np.where(upright, shorter, length), np.where(upright, length, shorter)
    turn = _within(numbers[5], -TURN[KIND], TURN[KIND]) & 1023
    colours = _colours(numbers[12:16], ground)
    if look:
        turn[-1], colours[-1] = _within(numbers[5, -1], *look.turn) & 1023, look.colour
    sine, cosine = SINE_TABLE[turn], SINE_TABLE[turn + 256]
    lean = _within(numbers[6], -LEAN, LEAN)
    matrix = (
        cosine * width >> 12,
        (cosine * lean - 256 * sine) * height >> 20,
        sine * width >> 12,
        (sine * lean + 256 * cosine) * height >> 20,
    )
    # The main object may lie outside of the image only by a small margin.
    margin = np.where(KIND == MAIN, length // 2 - 2000, 0)
    x, y = _within(numbers[7:9], margin, SIDE - margin)
    opacity = np.where(KIND <= BAR, _within(numbers[9], *FAINT), 256)
    cuts = _cuts(_within(numbers[10], 0, 128), numbers[11] & 1)
    numeric = (each.tolist() for each in (drawing, x, y, length))
    matrices = zip(*(entry.tolist() for entry in matrix), strict=True)
    kinds = KIND.tolist()
    of_fragments = [c if k == FRAGMENT else None for c, k in zip(cuts.tolist(), kinds, strict=True)]
    of_objects = [c if k >= OBJECT else None for c, k in zip(labels.tolist(), kinds, strict=True)]
    columns = *numeric, matrices, colours.tolist(), opacity.tolist(), of_fragments, of_objects
    return [Item(*fields) for fields in zip(*columns, strict=True)]


def _cuts(start: np.ndarray, across: np.ndarray) -> np.ndarray:
    """Returns the edges of a random half of each item's drawing, int `[items, 4]` (`Item.cut`).

    `start` is the left or top edge of the half, in 256ths of the drawing's side. `across` is 1 if
    the left or right part is cut off, so that the half is narrow. It is 0 if the upper or lower
    part is cut off.
    """
    whole, half = np.array([[0, 256]]), np.stack([start, start + 128], axis=1)
    across = across[:, None].astype(bool)
    return np.concatenate([np.where(across, half, whole), np.where(across, whole, half)], axis=1)


def _colours(numbers: np.ndarray, ground: np.ndarray) -> np.ndarray:
    """Returns the colours of items, `[items, 3]`; items are brighter than the background.

    Otherwise, small Transformers would need many times more steps before they start to learn.
    """
    brighter = _within(numbers[0], *CONTRAST)[:, None]
    return np.clip(ground + brighter + _within(numbers[1:4].T, -SHIFT, SHIFT), 0, 255)


def draw(scene: Scene, parts: Parts, size: int, generator: np.random.Philox) -> np.ndarray:
    """Draws a scene with noise, uint8 `[size, size, 3]`."""
    image = _texture(scene, size)
    for item, (rows, columns), cover in _covers(scene, parts, size):
        part = image[:, rows, columns]
        part += ((np.array(item.colour, np.int32)[:, None, None] - part) * cover) >> 8
    noise = generator.random_raw(-(-image.size // 8)).astype("<u8").view(np.int8)[: image.size]
    image += (noise.reshape(image.shape).astype(np.int32) * scene.noise) >> 7
    np.minimum(np.maximum(image, 0, out=image), 255, out=image)
    return np.ascontiguousarray(image.astype(np.uint8).transpose(1, 2, 0))


def objects(scene: Scene, parts: Parts, size: int) -> Objects:
    """Returns the objects of a scene, and the visible object at each pixel.

    An object covers a pixel if at least half of the pixel belongs to it. The visible object is the
    frontmost object that covers the pixel.
    """
    seen = np.full((size, size), -1, np.int8)
    whole = [item for item in scene.items if item.label is not None]
    for item, place, cover in _covers(scene, parts, size):
        if item.label is not None:
            seen[place][cover >= 128] = next(
                number for number, one in enumerate(whole) if one is item
            )
    labels = tuple(item.label for item in whole if item.label is not None)
    return Objects(seen, labels, scene.main - (len(scene.items) - len(whole)))


def _texture(scene: Scene, size: int) -> np.ndarray:
    """Returns the background texture of a scene, int32 `[3, size, size]`."""
    right, down = (np.arange(size) * step // size for step in scene.steps)
    x, y = right[None, :] - down[:, None], down[None, :] + right[:, None]
    column, row = (x >> 8) & (LATTICE - 1), ((y >> 8) & (LATTICE - 1)) * LATTICE
    next_column, next_row = (column + 1) & (LATTICE - 1), (row + LATTICE) & (LATTICE * LATTICE - 1)
    x, y = (x & 255).astype(np.uint16), (y & 255).astype(np.uint16)
    shades = scene.lattice
    shade = _between(
        _between(shades.take(row + column), shades.take(row + next_column), x),
        _between(shades.take(next_row + column), shades.take(next_row + next_column), x),
        y,
    ).astype(np.int32)
    one, other = scene.colours[:, :, None, None]
    return one + ((other - one) * shade >> 8)


def _between(one: np.ndarray, other: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Interpolates between two uint16 arrays; `share` is the weight of `other`, in 256ths."""
    return (one * (256 - share) + other * share) >> 8


def _covers(
    scene: Scene, parts: Parts, size: int
) -> Iterator[tuple[Item, tuple[slice, slice], np.ndarray]]:
    """Yields (item, (rows, columns), coverage) for each item that is within the image.

    `rows` and `columns` are slices of the image. The coverage is the opacity of the item at each of
    these pixels, int `[rows, columns]`, from 0 to 256.
    """
    boxes = [(item, box) for item in scene.items if (box := _box(item, parts, size)).pixels]
    # The pixels of all items are computed in one array, because with small images the time of NumPy
    # calls is mostly overhead.
    ends = list(itertools.accumulate(box.pixels for _, box in boxes))
    spans = [slice(end - box.pixels, end) for (_, box), end in zip(boxes, ends, strict=True)]
    x, y, places = np.empty((3, ends[-1]), np.int32)
    for (_, box), span in zip(boxes, spans, strict=True):
        rows, columns = np.arange(box.height, dtype=np.int32), np.arange(box.width, dtype=np.int32)
        for (start, right, below), out in ((box.across, x), (box.down, y)):
            grid = out[span].reshape(box.height, box.width)
            np.add.outer(rows * below + start, columns * right, out=grid)
        places[span] = box.place
    for coordinate in (x, y):
        coordinate >>= 12
        np.maximum(coordinate, 0, out=coordinate)
        np.minimum(coordinate, (STRIDE - 1) * 256 - 1, out=coordinate)
    places += (y >> 8) * STRIDE + (x >> 8)
    ink = _sample(parts.drawings, places, x, y)
    for (item, box), span in zip(boxes, spans, strict=True):
        cover = ink[span]
        # The edges of an enlarged drawing are sharpened. Otherwise, each edge would be a gradient
        # of several pixels.
        if (sharper := item.length * size // (SIDE * box.side)) > 1:
            cover = np.minimum(np.maximum((cover - 128) * sharper + 128, 0), 255)
        if item.cut:
            left, right, top, bottom = (256 + box.side * edge for edge in item.cut)
            column, row = x[span], y[span]
            cover = cover * ((column >= left) & (column <= right) & (row >= top) & (row <= bottom))
        cover = (cover + (cover >> 7)) * item.opacity >> 8
        place = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
        yield item, place, cover.reshape(box.height, box.width)


def _sample(drawings: np.ndarray, places: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Interpolates bilinearly between pixels of `Parts.drawings`; returns int32 from 0 to 255.

    Each value is interpolated between four neighbouring pixels. `places` are the offsets of the
    upper left pixels in `drawings`. The lower eight bits of `x` and `y` are the position relative
    to this pixel, in 256ths of a pixel.
    """
    x, y = (x & 255).astype(np.uint16), (y & 255).astype(np.uint16)
    upper = _between(drawings.take(places), drawings[1:].take(places), x)
    lower = _between(drawings[STRIDE:].take(places), drawings[STRIDE + 1 :].take(places), x)
    return _between(upper, lower, y).astype(np.int32)


def _box(item: Item, parts: Parts, size: int) -> _Box:
    """Returns the image pixels that an item may cover, and their mapping to the item's drawing."""
    pixels = item.length * size // SIDE
    level = next((level for level in range(LEVELS - 1) if CELL >> (level + 1) < pixels), LEVELS - 1)
    side = CELL >> level
    a, b, c, d = item.matrix
    # Bilinear interpolation blurs a drawing's edge by up to one pixel into its empty border.
    wide, high = ((abs(one) + abs(two)) * (side + 1) // (2 * side) for one, two in ((a, b), (c, d)))
    left, right = _clipped(item.x - wide, size), _clipped(item.x + wide + SIDE // size, size)
    top, bottom = _clipped(item.y - high, size), _clipped(item.y + high + SIDE // size, size)
    # The inverse matrix maps the centre of an image pixel to a position in the drawing.
    determinant, scale = (a * d - b * c) * size, side << 20
    x, y = (2 * left + 1) * SIDE - 2 * size * item.x, (2 * top + 1) * SIDE - 2 * size * item.y
    middle = (128 + 128 * side) << 12  # Pixel 0 of the stored drawing is its border.
    drawings = len(parts.drawings) // (LEVELS * STRIDE * STRIDE)  # At each level.
    return _Box(
        top,
        left,
        max(bottom - top, 0),
        max(right - left, 0),
        (level * drawings + item.drawing) * STRIDE * STRIDE,
        side,
        *(
            (
                middle + (p * x + q * y) * scale // (2 * determinant),
                p * SIDE * scale // determinant,
                q * SIDE * scale // determinant,
            )
            for p, q in ((d, -b), (-c, a))
        ),
    )


def _clipped(length: int, size: int) -> int:
    """Converts a distance from an image's edge, in 1/65,536 of its side, to pixels up to `size`."""
    return min(max(length * size // SIDE, 0), size)
