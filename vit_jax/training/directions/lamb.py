"""LAMB (You et al., 2020): Adam's updates, each in proportion to the length of what it changes."""

from collections.abc import Callable

import optax
from ml_collections import ConfigDict

from vit_jax.training.directions import adam


def direction(config: ConfigDict) -> optax.GradientTransformation:
    """Adam's direction; `to_length` comes behind weight decay."""
    return adam.direction(config)


def to_length(decays: Callable[[dict], dict] | None) -> optax.GradientTransformation:
    """Updates of what decays, each array's made as long as the array; an array of zeros' stays as
    it is.

    What does not decay keeps Adam's, as in Apex's FusedLAMB and timm's Lamb.

    Args:
      decays: of parameters, True for those that decay; None: all.
    """
    scaled = optax.scale_by_trust_ratio()
    return scaled if decays is None else optax.masked(scaled, decays)
