"""DeiT III's 3-Augment (2204.07118, section 4): one of grey, solarising and blur, then colour
jitter.

Pillow does them, so that the pixels are those of the authors' code to the bit.
"""

import dataclasses

import numpy as np

from vit_jax.data.colour_distortion import RADII, distorted, draw_jitter
from vit_jax.options.objective import THRESHOLD


@dataclasses.dataclass(frozen=True)
class ThreeAugment:
    """`(pixels, rng) -> pixels`: grey, solarising or blur, with equal chances, then colour jitter.

    Args:
      jitter: strength x of brightness, contrast and saturation, each times a factor in 1 +- x,
        whose order is random.
    """

    jitter: float = 0.3

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Augments uint8 `[height, width, 3]`, which is not written to, into an array of the same
        shape.
        """
        return distorted(pixels, self.draw(rng))

    def draw(self, rng: np.random.Generator) -> list[tuple[str, float]]:
        """Names and values of the operations to be done, in their order."""
        choices = (("grey", 1.0), ("solarize", THRESHOLD), ("blur", rng.uniform(*RADII)))
        return [choices[rng.integers(3)], *draw_jitter((self.jitter,) * 3, rng)]
