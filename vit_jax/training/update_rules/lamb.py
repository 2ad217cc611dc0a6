"""LAMB (You et al., 2020): Adam's updates, scaled to the norm of each array."""

from collections.abc import Callable

import optax

from vit_jax.options.optimizer import OptimizerOptions
from vit_jax.training.update_rules import adam


def update_rule(config: OptimizerOptions) -> optax.GradientTransformation:
    """Returns Adam's update; `to_length` is applied after weight decay."""
    return adam.update_rule(config)


def to_length(decays: Callable[[dict], dict] | None) -> optax.GradientTransformation:
    """Scales the update of each array with weight decay to the array's norm.

    An array of zeros keeps its update. Arrays without weight decay keep Adam's update, as in Apex's
    FusedLAMB and timm's Lamb.

    Args:
      decays: returns True for the parameters with weight decay; None: all.
    """
    scaled = optax.scale_by_trust_ratio()
    return scaled if decays is None else optax.masked(scaled, decays)
