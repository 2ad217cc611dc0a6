"""Fields of dense prediction, which follow an image's crop and flip: masks of classes."""

from typing import Any

import numpy as np

from vit_jax.data.fields import BOXES, IGNORED, MASK, Field


def mask_field(size: int) -> Field:
    """Returns the field of masks, uint8 `[size, size]`; padding is `IGNORED`."""

    def encode(mask: np.ndarray, placement: Any) -> np.ndarray:
        return placement.place_map(mask, IGNORED, np.empty((size, size), np.uint8))

    return Field(MASK, (size, size), np.uint8, encode, f"mask of {size}", "map")


def boxes_field(size, most):
    def encode(value, placement):
        out = np.zeros((most, 5), np.float32)
        out[:, 4] = -1
        corners = placement.place_boxes(value.corners)
        order = np.argsort(-np.prod(corners[:, 2:] - corners[:, :2], axis=1), kind="stable")
        for row, index in enumerate(order[:most]):
            out[row, :4], out[row, 4] = corners[index], value.labels[index]
        return out

    return Field(BOXES, (most, 5), np.float32, encode, "", "boxes")
