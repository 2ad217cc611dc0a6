"""Scikit-learn's handwritten digits: a small data set that needs no download."""

import importlib.util
from pathlib import Path

import numpy as np

from vit_jax.data.sources.in_memory import InMemory
from vit_jax.data.sources.kind import SourceKind
from vit_jax.errors import UserError


def digits(split: str) -> InMemory:
    """Returns a split of scikit-learn's 1,797 scans of handwritten digits, as 8x8 RGB images.

    The split `train` has 1,437 scans, and the split `test` has 360.
    """
    if split not in ("train", "test"):
        raise UserError(f"digits has no split {split!r}; there are: test, train")
    # Read the file directly: importing scikit-learn takes longer than all other imports together.
    package = Path(importlib.util.find_spec("sklearn").origin).parent
    table = np.loadtxt(
        package / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.int64
    )
    order = np.random.default_rng(0).permutation(len(table))
    table = table[order[:1437] if split == "train" else order[1437:]]
    grey = np.round(table[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=-1)
    return InMemory(f"digits {split}", images, table[:, 64], tuple(str(d) for d in range(10)))


DIGITS = SourceKind(
    "digits",
    "scikit-learn's handwritten digits",
    lambda split, options: digits(split),
    counts=lambda path: (1437, 10),
)
