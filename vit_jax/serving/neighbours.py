"""Finds the images of a folder that are most similar to a photograph, by a model's features."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.decode import Unreadable
from vit_jax.data.image_files import find_images
from vit_jax.errors import as_text
from vit_jax.evaluation.knn import unit
from vit_jax.inspection.page_images import image_address
from vit_jax.serving.engine import ClassifierEngine


class Neighbours:
    """The readable images of a folder and their features, which are computed at construction.

    Raises:
      UserError: the folder contains no readable image.
    """

    def __init__(
        self, folder: str, engine: ClassifierEngine, threads: int, log: Callable[[str], None]
    ):
        self.folder, self._crop = Path(folder).absolute(), engine.classifier.crop
        self._files = find_images([folder])
        for line in self._files.note():
            log(line)
        found = engine.features(self._files, threads, log)
        self._features, self._indices = unit(found.values), found.indices.tolist()

    def __len__(self):
        return len(self._indices)

    def nearest(self, features: np.ndarray, count: int) -> list[dict[str, Any]]:
        """Returns the `count` images whose features are most similar to `features`.

        The result has a mapping for each image, with `path`, `similarity` (cosine) and `picture` (a
        data URL).
        """
        similarities = self._features @ unit(features[None])[0]
        nearest = np.argsort(-similarities, kind="stable")[:count].tolist()
        found = []
        for place in nearest:
            index = self._indices[place]
            path = as_text(os.path.relpath(self._files.path(index), self.folder))
            similarity = float(similarities[place])
            found.append(dict(path=path, similarity=similarity, picture=self._picture(index)))
        return found

    def _picture(self, index: int) -> str | None:
        """Returns an image after the evaluation transform, as a data URL; None if unreadable."""
        try:
            return image_address(self._crop(self._files[index].image))
        except (OSError, Unreadable):
            return None
