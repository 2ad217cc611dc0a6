"""Images in memory: arrays, scikit-learn's digits, and random ones."""

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np

from vit_jax.data.sources.base import Example, Source
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class InMemory(Source):
    """Images held as one uint8 array `[images, height, width, channels]`, in a random order."""

    name: str
    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    max_labels: int = 1

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return Example(self.images[index], self.labels_of(index))

    def describe(self, index):
        return f"{self.name} image {index}"

    def labels_of(self, index):
        return (int(self.labels[index]),)

    def known_labels(self):
        return self.labels[:, None].astype(np.int32)


def digits(split: str) -> InMemory:
    """Scikit-learn's 1,797 scans of handwritten digits, 8x8 grey, as RGB; 1,437 to train, 360 to test."""
    if split not in ("train", "test"):
        raise UserError(f"digits has no split {split!r}; there are: test, train")
    # The file alone: to import scikit-learn takes longer than all else that a short run imports.
    package = Path(importlib.util.find_spec("sklearn").origin).parent
    table = np.loadtxt(package / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.int64)
    order = np.random.default_rng(0).permutation(len(table))
    table = table[order[:1437] if split == "train" else order[1437:]]
    grey = np.round(table[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=-1)
    return InMemory(f"digits {split}", images, table[:, 64], tuple(str(d) for d in range(10)))


@dataclasses.dataclass(frozen=True)
class Synthetic(Source):
    """Random images, each a function of its index, for checking a set-up without data."""

    image_size: int
    num_classes: int
    size: int = 64
    max_labels: int = 1

    @property
    def class_names(self):
        return tuple(str(label) for label in range(self.num_classes))

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        image = rng.integers(256, size=(self.image_size, self.image_size, 3), dtype=np.uint8)
        return Example(image, (int(rng.integers(self.num_classes)),))

    def describe(self, index):
        return f"synthetic image {index}"
