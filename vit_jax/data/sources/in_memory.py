"""Images in memory, as one array."""

import dataclasses

import numpy as np

from vit_jax.data.sources.base import Example, Source


@dataclasses.dataclass(frozen=True)
class InMemory(Source):
    """Images in one uint8 array `[images, height, width, channels]`, which is already shuffled."""

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
