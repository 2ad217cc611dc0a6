"""A custom data source, and near-duplicates between two of its splits."""

import numpy as np

from vit_jax.data.sources.base import Example, Source
from vit_jax.preparation.duplicate_search import leak_note, leaks


class Stripes(Source):
    """Images of vertical and horizontal stripes."""

    class_names = ("upright", "level")

    def __init__(self, first: int):
        self.first = first

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Example:
        rng = np.random.default_rng(self.first + index)
        image = np.repeat(rng.integers(256, size=(32, 1, 3), dtype=np.uint8), 32, axis=1)
        return Example(image if index % 2 else image.transpose(1, 0, 2), (index % 2,))

    def describe(self, index: int) -> str:
        return f"stripes {self.first + index}"


train, test = Stripes(0), Stripes(90)
for ours, theirs, similarity in leaks(train, test).pairs:
    print(train.describe(ours), test.describe(theirs), f"{similarity:.3f}")
print(leak_note(train, test, "test"))
