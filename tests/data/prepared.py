"""Writes TFDS data sets with a few made-up examples, as TFDS would prepare them, without
TensorFlow.

The builders are those of TFDS, so the features have their real names, types and encodings.
"""

import io
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

features = tfds.features
BOX = features.BBox(0.0, 0.0, 1.0, 1.0)


def png(pixels: np.ndarray) -> io.BytesIO:
    """Encodes uint8 pixels `[height, width, 1 or 3]` as PNG."""
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(file, "PNG")
    file.seek(0)
    return file


def made_up(feature, number: int):
    """Returns a value of a feature, which contains the example's number.

    Pixels and labels are equal to the number.
    """
    if isinstance(feature, features.FeaturesDict):
        return {name: made_up(part, number) for name, part in feature.items()}
    if isinstance(feature, features.Sequence):
        return []
    if isinstance(feature, features.Image):
        return png(np.full([size or 8 for size in feature.shape], number % 256, np.uint8))
    if isinstance(feature, features.ClassLabel):
        return number % feature.num_classes
    if isinstance(feature, features.BBoxFeature):
        return BOX
    return (
        str(number)
        if isinstance(feature, features.Text)
        else np.zeros(feature.shape, feature.np_dtype)
    )


def prepare(
    dataset: str,
    data_dir: Path,
    splits: dict[str, int],
    example: Callable[[int], dict] = lambda number: {},
) -> None:
    """Writes a data set.

    Args:
      dataset: TFDS's `name/config:version`.
      data_dir: the folder of TFDS data sets.
      splits: the number of examples of each split. Examples are numbered consecutively through
        all splits.
      example: returns the features of an example by its number; they replace the made-up ones.
    """
    builder = tfds.builder(dataset, data_dir=data_dir, file_format="array_record")
    starts = np.cumsum([0, *splits.values()])

    def examples(start: int, count: int):
        for number in range(start, start + count):
            yield str(number), made_up(builder.info.features, number) | example(number)

    generators = {
        name: examples(start, count)
        for (name, count), start in zip(splits.items(), starts, strict=False)
    }
    tfds.disable_progress_bar()
    with mock.patch.object(type(builder), "_split_generators", lambda self, manager: generators):
        builder.download_and_prepare()
