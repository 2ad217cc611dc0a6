"""Muon: each kernel's momentum, made orthogonal (Jordan et al., 2024)."""

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict
from optax.contrib import MuonDimensionNumbers

from vit_jax.parallel.sharding import path_name
from vit_jax.training.lora import weight_axes

# RMS of a kernel's update, which is about Adam's, so that one learning rate and one weight decay
# serve both (Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.2).
RMS = 0.2


def direction(config: ConfigDict) -> optax.GradientTransformation:
    """Muon's direction (Jordan et al., 2024, kellerjordan.github.io/posts/muon), as Optax computes
    it.

    A kernel is a matrix of its inputs by its outputs, or one for each part, as of q, k and v. Five
    steps of Newton and Schulz bring the singular values of its Nesterov momentum `beta1`, 0.95 in
    the original, near to 1. What reads pixels or gives classes, and what is no kernel, has Adam's
    direction, with Nesterov's momentum too.
    """
    return optax.contrib.muon(
        learning_rate=-1.0,  # The rate comes behind weight decay, and turns the sign there.
        beta=config.beta1,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        eps=config.epsilon,
        mu_dtype=jnp.dtype(config.moment_dtype),
        consistent_rms=RMS,
        muon_weight_dimension_numbers=lambda weights: jax.tree.map_with_path(matrix_axes, weights),
    )


def matrix_axes(path: tuple, x: jax.Array) -> MuonDimensionNumbers | None:
    """The axes of a weight that are its inputs and its outputs; None: Adam's."""
    axes = weight_axes(path_name(path), x.ndim)
    if axes is None or not axes.inputs or not {"channels", "classes"}.isdisjoint(axes.names):
        return None
    inputs, outputs = [], []
    for axis, name in enumerate(axes.names):
        if name != "part":
            (inputs if axis < axes.inputs else outputs).append(axis)
    return MuonDimensionNumbers(tuple(inputs), tuple(outputs))
