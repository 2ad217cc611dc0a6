"""A data set of coloured rectangles with masks, and a run that learns to segment them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vit_jax import train
from vit_jax.config import base_config

NAMES = ("background", "red", "blue")
COLOURS = np.array([[90, 120, 90], [220, 40, 40], [40, 40, 220]], np.uint8)


def draw(index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a noisy image with a rectangle of each colour, and its mask.

    Height and width are 40 to 79 pixels.
    """
    rng = np.random.default_rng(index)
    height, width = rng.integers(40, 80, 2)
    mask = np.zeros((height, width), np.uint8)
    for label in (1, 2):
        top, left = rng.integers(0, (height - 20, width - 20))
        mask[top : top + 20, left : left + 20] = label
    noise = rng.integers(-20, 20, (height, width, 3))
    return (COLOURS[mask] + noise).clip(0, 255).astype(np.uint8), mask


def write_shapes(folder: Path) -> Path:
    """Writes 64 images for training and 12 for validation, with their masks and class names."""
    for split, start, images in (("train", 0, 64), ("val", 1000, 12)):
        for index in range(start, start + images):
            for kind, pixels in zip(("images", "masks"), draw(index), strict=True):
                (folder / kind / split).mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(folder / kind / split / f"{index}.png")
    (folder / "classes.txt").write_text("\n".join(NAMES))
    return folder


def config_of_shapes(folder):
    """Returns the config of a run that learns to classify pixels by their colour."""
    config = base_config()
    config.model.name = "ViT-Ti/8"
    config.model.update(dict(dim=32, depth=1, mlp_dim=32, heads=2))
    config.objective.name = "segmentation"
    config.data.update(dict(source="masks", path=str(folder), test_split="val"))
    config.data.update(dict(image_size=32, test_resize=32))
    config.data.update(dict(crop="scale_jitter", test_crop="fit", workers=0, interpolation="area"))
    config.batch_size, config.steps, config.log_every = 16, 40, 20
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 1e-2, 5
    config.evaluate_every = config.checkpoint.every = 40
    return config


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """Returns the data set's folder, in the layout of the source `masks`."""
    return write_shapes(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="session")
def segmentation_run(shapes, tmp_path_factory):
    """Returns the workdir of a finished run and its final metrics."""
    folder = tmp_path_factory.mktemp("segmentation") / "run"
    return folder, train(config_of_shapes(shapes), folder)
