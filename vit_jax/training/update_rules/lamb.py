"""LAMB (You et al., 2020): Adam's updates, scaled to the norm of each array."""

from collections.abc import Callable

import optax

from vit_jax.training.update_rules import adam

# The optimizer adds weight decay to Adam's update. Then LAMB's second stage, `to_length`, scales
# the update of each array to the norm of the array.
update_rule = adam.update_rule


def to_length(decays: Callable[[dict], dict] | None) -> optax.GradientTransformation:
    """Scales each array's update to the norm of the array, for arrays with weight decay.

    Arrays without weight decay keep Adam's update, as in Apex's FusedLAMB and timm's Lamb. The
    update of an array of zeros is not scaled either.

    Args:
      decays: function from the parameters to a mask, True for parameters with weight decay; None:
        all parameters have weight decay.
    """
    scaled = optax.scale_by_trust_ratio()
    return scaled if decays is None else optax.masked(scaled, decays)
