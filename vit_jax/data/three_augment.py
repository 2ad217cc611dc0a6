"""DeiT III's 3-Augment (2204.07118, section 4): grey, solarize or blur, then colour jitter.

The operations are Pillow's, so the results are bit-exact with the authors' code.
"""

import dataclasses

import numpy as np

from vit_jax.data.colour_distortion import RADII, distorted, draw_jitter
from vit_jax.options.objective import THRESHOLD


@dataclasses.dataclass(frozen=True)
class ThreeAugment:
    """3-Augment, `(pixels, rng) -> pixels`.

    It applies one of greyscale, solarization and blur, with equal probabilities, and then colour
    jitter.

    Args:
      jitter: brightness, contrast and saturation are scaled by factors in [1 - jitter, 1 + jitter],
        in random order.
    """

    jitter: float = 0.3

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Returns augmented pixels, uint8 `[height, width, 3]`; the input is unchanged."""
        return distorted(pixels, self.draw(rng))

    def draw(self, rng: np.random.Generator) -> list[tuple[str, float]]:
        """Draws the operations to apply; returns their names and values, in order."""
        choices = (("grey", 1.0), ("solarize", THRESHOLD), ("blur", rng.uniform(*RADII)))
        return [choices[rng.integers(3)], *draw_jitter((self.jitter,) * 3, rng)]
