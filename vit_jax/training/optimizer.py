"""Learning-rate schedule and optimizer (paper, section 4.1 and table 3)."""

import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.parallel.rules import path_name


def make_schedule(config: ConfigDict, steps: int) -> Callable[[jax.Array], jax.Array]:
    """The learning rate of update t = 1 ... `steps`; at t = 0 it would be 0.

    Linear warm-up times a linear or cosine decay from `learning_rate` to `end_learning_rate`,
    reached at the last update.

    Raises:
      UserError: warm-up as long as the whole run.
    """
    base, end, warmup = config.learning_rate, config.end_learning_rate, config.warmup_steps
    if warmup >= steps and warmup > 0:
        raise UserError(
            f"optimizer.warmup_steps = {warmup} is not below the run's {steps} steps; "
            f"use fewer, such as {steps // 10}, or train longer"
        )

    def schedule(t: jax.Array) -> jax.Array:
        t = jnp.asarray(t, jnp.float32)
        progress = jnp.clip((t - warmup) / (steps - warmup), 0, 1)
        rate = {
            "linear": end + (base - end) * (1 - progress),
            "cosine": end + (base - end) * (1 + jnp.cos(jnp.pi * progress)) / 2,
            "constant": jnp.full_like(progress, base),
        }[config.schedule]
        return rate * jnp.minimum(1, t / warmup) if warmup else rate

    return schedule


def make_optimizer(
    config: ConfigDict,
    schedule: Callable[[jax.Array], jax.Array],
    trained: Callable[[dict], dict] | None = None,
) -> optax.GradientTransformation:
    """Clip by global norm, Adam, Adafactor or momentum, decoupled weight decay, learning rate by layer.

    Adafactor keeps sums over rows and columns in place of the second moment, as in "Scaling Vision
    Transformers" (Zhai et al., 2022, section 3.5): decay up to beta2, updates clipped to RMS 1, no
    scaling by the parameters, momentum. `moment_dtype` is of the first moment only: a second moment in
    bfloat16 would stand still, since its steps of 1 / 1000 are below bfloat16's rounding.

    Args:
      trained: of weights, True for those that change; None: all. For the others nothing is kept.
    """
    moment = jnp.dtype(config.moment_dtype)
    if config.name == "adam":
        direction = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon, mu_dtype=moment)
    elif config.name == "adafactor":
        direction = optax.chain(
            optax.scale_by_factored_rms(
                min_dim_size_to_factor=32,
                decay_rate_fn=lambda step, power: jnp.minimum(config.beta2, 1 - (step + 1.0) ** -power),
            ),
            optax.clip_by_block_rms(1.0),
            optax.ema(config.beta1, debias=False, accumulator_dtype=moment),
        )
    else:
        direction = optax.trace(decay=config.beta1, accumulator_dtype=moment)
    whole = optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        direction,
        optax.add_decayed_weights(config.weight_decay, mask=DECAYED[config.decay]),
        scale_by_layer(config.layer_decay) if config.layer_decay < 1 else optax.identity(),
        # Optax counts from 0; the first update is t = 1, and its rate is not 0.
        optax.scale_by_learning_rate(lambda count: schedule(count + 1)),
    )
    if trained is None:
        return whole
    return optax.partition({True: whole, False: optax.set_to_zero()}, trained)


def average_share(config: ConfigDict, t: jax.Array) -> jax.Array:
    """The share of the newest parameters in the average after update t = 1, 2, ...

    Polyak's average, sum of average^(t - i) times parameters i. From `zero` it is divided by the sum of its
    weights, so that nothing of the first parameters is left in it; from `weights` it starts at these, and
    keeps average^t of them (13.5 % after 20,000 steps at 0.9999).
    """
    if config.average_from == "weights":
        return jnp.float32(1 - config.average)
    return (1 - config.average) / -jnp.expm1(t * math.log(config.average))


def kernels(params: dict) -> dict:
    """True for the weights of dense and convolution layers: by name, whatever their rank."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key == "kernel", params)


def matrices(params: dict) -> dict:
    """True for all but biases and scales: what has more than one axis in PyTorch, tokens and tables too."""
    vectors = ("bias", "scale", "scale1", "scale2")
    return jax.tree.map_with_path(lambda path, _: path[-1].key not in vectors, params)


DECAYED = {"kernels": kernels, "matrices": matrices, "all": None}


def scale_by_layer(decay: float) -> optax.GradientTransformation:
    """Updates of an encoder layer times `decay` for each layer between it and the head.

    What comes before the encoder counts as one layer; the last norm and the head keep their rate
    (BEiT, 2106.08254; MAE, 2111.06377, appendix A.2).
    """

    def scale(updates, params=None):
        del params
        layers = jax.tree.map_with_path(lambda path, _: _layer(path_name(path)), updates)
        depth = 1 + max((layer for layer in jax.tree.leaves(layers) if layer < math.inf), default=-1)
        return jax.tree.map(lambda x, layer: x * decay ** (depth - min(layer, depth)), updates, layers)

    return optax.stateless(scale)


def _layer(path: str) -> float:
    """Number of a parameter's encoder layer; -1 before them, infinity behind."""
    if path.startswith("extra/objective/"):  # A decoder's layers too.
        return math.inf
    if found := re.search(r"(?:^|/)blocks/(\d+)/", path):
        return int(found[1])
    behind = r"(?:^|/)(norm|fc_norm|pre_logits|attention_pooling|head|distillation_head)/"
    return math.inf if re.search(behind, path) and "resnet/" not in path else -1
