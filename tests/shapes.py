"""A data set of coloured rectangles with their masks, and a run that segments them."""

import dataclasses

import numpy as np
import pytest

from vit_jax import train
from vit_jax.config import base_config
from vit_jax.data import sources
from vit_jax.data.fields import MASK
from vit_jax.data.sources.base import Example, Source
from vit_jax.data.sources.kind import SourceKind

NAMES = ("background", "red", "blue")
COLOURS = np.array([[90, 120, 90], [220, 40, 40], [40, 40, 220]], np.uint8)


def draw(index: int) -> tuple[np.ndarray, np.ndarray]:
    """A noisy image of 40 to 80 pixels with a rectangle of each colour, and its mask."""
    rng = np.random.default_rng(index)
    height, width = rng.integers(40, 80, 2)
    mask = np.zeros((height, width), np.uint8)
    for label in (1, 2):
        top, left = rng.integers(0, (height - 20, width - 20))
        mask[top : top + 20, left : left + 20] = label
    noise = rng.integers(-20, 20, (height, width, 3))
    return (COLOURS[mask] + noise).clip(0, 255).astype(np.uint8), mask


@dataclasses.dataclass(frozen=True)
class Shapes(Source):
    """The first images."""

    size: int
    start: int = 0
    class_names = NAMES
    max_labels = 1
    fields = (MASK,)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return Example(draw(self.start + index)[0], ())

    def fields_of(self, index):
        return {MASK: draw(self.start + index)[1]}

    def describe(self, index):
        return f"shapes {self.start + index}"


def config_of_shapes():
    """The config of a run that learns the shapes' classes by their colours."""
    config = base_config()
    config.model.name = "ViT-Ti/8"
    config.model.update(dict(dim=32, depth=1, mlp_dim=32, heads=2))
    config.objective.name = "segmentation"
    config.data.update(dict(source="synthetic", image_size=32, test_resize=32))
    config.data.update(dict(crop="scale_jitter", test_crop="fit", workers=0, interpolation="area"))
    config.batch_size, config.steps, config.log_every = 16, 40, 20
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 1e-2, 5
    config.evaluate_every = config.checkpoint.every = 40
    return config


def opened(split, options):
    return Shapes(64) if split.startswith("train") else Shapes(12, 1000)


@pytest.fixture(scope="session")
def segmentation_run(tmp_path_factory):
    """A workdir, and its last metrics."""
    folder = tmp_path_factory.mktemp("segmentation") / "run"
    kind = SourceKind("synthetic", "shapes", opened, made_up=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sources.SOURCES, "synthetic", kind)
        return folder, train(config_of_shapes(), folder)
