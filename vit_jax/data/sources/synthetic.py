"""Random images to check a setup without data."""

import dataclasses

import numpy as np

from vit_jax.data.fields import BOXES, DEPTH, IGNORED, INSTANCES, MASK, TEXT, Boxes
from vit_jax.data.sources.base import Example, Source
from vit_jax.data.sources.kind import SourceKind


@dataclasses.dataclass(frozen=True)
class Synthetic(Source):
    """Random images to check a setup without data; an image depends only on its index."""

    image_size: int
    num_classes: int
    size: int = 64
    max_labels: int = 1
    fields = (TEXT, MASK, BOXES, INSTANCES, DEPTH)

    @property
    def class_names(self):
        return tuple(str(label) for label in range(self.num_classes))

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        image = rng.integers(256, size=(self.image_size, self.image_size, 3), dtype=np.uint8)
        return Example(image, (int(rng.integers(self.num_classes)),))

    def fields_of(self, index):
        text = f"an image of class {self.labels_of(index)[0]}"
        classes = min(self.num_classes, IGNORED)
        mask = np.random.default_rng(index).integers(classes, size=(4, 4), dtype=np.uint8)
        rows = np.arange(self.image_size) * 4 // self.image_size
        mask = mask[rows[:, None], rows]
        half = self.image_size / 2
        corners = np.array([[0, 0, half, half], [half, half, 2 * half, 2 * half]], np.float32)
        masks = (rows >= 2) == np.array([False, True])[:, None]
        masks = masks[:, :, None] & masks[:, None]
        boxes = Boxes(corners, np.array([0, self.num_classes - 1], np.int32), masks)
        depth = 1 + mask.astype(np.float32)
        return {TEXT: (text,), MASK: mask, BOXES: boxes, INSTANCES: boxes, DEPTH: depth}

    def describe(self, index):
        return f"synthetic image {index}"


SYNTHETIC = SourceKind(
    "synthetic",
    "random images",
    lambda split, options: Synthetic(options.image_size, options.num_classes or 10),
    made_up=True,
)
