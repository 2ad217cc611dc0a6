"""Fields of dense prediction, which follow an image's crop and flip: masks of classes."""

from typing import Any

import numpy as np

from vit_jax.data.fields import IGNORED, MASK, Field


def mask_field(size: int) -> Field:
    """Returns the field of masks, uint8 `[size, size]`; padding is `IGNORED`."""

    def encode(mask: np.ndarray, placement: Any) -> np.ndarray:
        return placement.place_map(mask, IGNORED, np.empty((size, size), np.uint8))

    return Field(MASK, (size, size), np.uint8, encode, f"mask of {size}", "map")
