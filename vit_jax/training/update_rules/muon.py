"""Muon: the orthogonalized momentum of each kernel (Jordan et al., 2024)."""

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from vit_jax.options.optimizer import OptimizerOptions
from vit_jax.parallel.sharding import path_name
from vit_jax.training.lora import weight_axes

# RMS of a kernel's update. It is similar to the RMS of Adam's updates, so Muon and Adam can use the
# same learning rate and weight decay (Liu et al., "Muon is Scalable for LLM Training", 2025,
# section 2.2).
RMS = 0.2


def update_rule(config: OptimizerOptions) -> optax.GradientTransformation:
    """Returns Optax's Muon update (Jordan et al., 2024, kellerjordan.github.io/posts/muon).

    A kernel is treated as an inputs x outputs matrix. A stacked kernel of queries, keys and values
    is treated as three matrices. Five Newton-Schulz iterations bring the singular values of the
    kernel's Nesterov momentum (`beta1`, 0.95 in the original) close to 1.

    The patch embedding, the classification head, and all arrays other than kernels have Adam's
    update with Nesterov momentum.
    """
    return optax.contrib.muon(
        learning_rate=-1.0,  # The sign and the learning rate are applied after weight decay.
        beta=config.beta1,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        eps=config.epsilon,
        mu_dtype=jnp.dtype(config.moment_dtype),
        consistent_rms=RMS,
        muon_weight_dimension_numbers=lambda weights: jax.tree.map_with_path(matrix_axes, weights),
    )


def matrix_axes(path: tuple, x: jax.Array) -> MuonDimensionNumbers | None:
    """Returns the input axes and output axes of a kernel for Muon; None: the weight uses Adam."""
    axes = weight_axes(path_name(path), x.ndim)
    if axes is None or not axes.inputs or not {"channels", "classes"}.isdisjoint(axes.names):
        return None
    inputs, outputs = [], []
    for axis, name in enumerate(axes.names):
        if name != "part":
            (inputs if axis < axes.inputs else outputs).append(axis)
    return MuonDimensionNumbers(tuple(inputs), tuple(outputs))
