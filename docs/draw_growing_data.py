"""Draws the pictures of docs/growing_data.md, and prints its tables of simple models' accuracies.

python docs/draw_growing_data.py                   # the pictures
python docs/draw_growing_data.py --table           # many minutes
python docs/draw_growing_data.py --table centred   # some minutes
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from vit_jax.data.sources import open_source

IMAGES = Path(__file__).parent / "images"
SIZES = 1_000, 10_000, 100_000
SEEN = 200_000  # The number of training images, including repetitions.
MODELS = {"logistic regression": (), "MLP, 128 hidden": (128,)}
# For each source: the collection, and the image size in pixels.
TABLES = {"scattered": ("digits", 32), "centred": ("letters", 16)}


def sheet(collection: str) -> Image.Image:
    """Returns a contact sheet: three rows of images, and the objects of the third row."""
    source = open_source("scattered", "train", path=collection, image_size=64)
    rows = [
        np.concatenate([source[10 * row + i].image for i in range(10)], axis=1) for row in range(3)
    ]
    masks = []
    for index in range(20, 30):
        seen, _, main = source.objects(index)
        masks.append(np.where(seen == main, 255, np.where(seen >= 0, 110, 0)).astype(np.uint8))
    rows.append(np.repeat(np.concatenate(masks, axis=1)[:, :, None], 3, axis=2))
    return Image.fromarray(np.concatenate(rows))


def coloured_sheet() -> Image.Image:
    """Returns a contact sheet of coloured digits: a row of the split `train`, and one of `test`."""
    rows = []
    for split in ("train", "test"):
        source = open_source("coloured", split, path="digits", image_size=64)
        rows.append(np.concatenate([source[7 * i].image for i in range(10)], axis=1))
    return Image.fromarray(np.concatenate(rows))


def pixels(name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images of a split of a source in `TABLES`, and their classes.

    The images are uint8 `[images, size * size * 3]`.
    """
    collection, size = TABLES[name]
    source = open_source(name, split, path=collection, image_size=size)
    images = np.empty((len(source), size * size * 3), np.uint8)
    for index in range(len(source)):
        images[index] = source[index].image.reshape(-1)
    return images, source.known_labels()[:, 0]


def accuracy(
    model, images: np.ndarray, labels: np.ndarray, tests: np.ndarray, answers: np.ndarray
) -> float:
    """Returns the accuracy on test images after training on `SEEN` images in random order."""
    rng, classes = np.random.default_rng(0), np.unique(answers)
    for _ in range(SEEN // 1000):
        some = rng.choice(len(images), 1000, replace=False)
        model.partial_fit(images[some] / np.float32(127.5) - 1, labels[some], classes=classes)
    return float(np.mean(model.predict(tests / np.float32(127.5) - 1) == answers))


def table(name: str) -> None:
    """Prints the accuracies on a source of `TABLES`, by model and number of training images."""
    from sklearn.neural_network import MLPClassifier

    images, labels = pixels(name, f"train[:{max(SIZES)}]")
    tests, answers = pixels(name, "test[:5000]")
    print("| |", " | ".join(f"{size:,} images" for size in SIZES), "|")
    for model, hidden in MODELS.items():
        reached = [
            accuracy(
                MLPClassifier(hidden, batch_size=100, learning_rate_init=3e-4, random_state=0),
                images[:size],
                labels[:size],
                tests,
                answers,
            )
            for size in SIZES
        ]
        print(f"| {model} |", " | ".join(f"{100 * one:.1f} %" for one in reached), "|", flush=True)


if __name__ == "__main__":
    if "--table" in sys.argv:
        table("centred" if "centred" in sys.argv else "scattered")
    else:
        for collection in ("digits", "glyphs"):
            sheet(collection).save(IMAGES / f"scattered_{collection}.png", optimize=True)
        coloured_sheet().save(IMAGES / "coloured_digits.png", optimize=True)
