"""Schedules of the learning rate (ViT paper, section 4.1 and table 3) and of the weight decay."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.options.optimizer import OptimizerOptions


def make_schedule(config: OptimizerOptions, steps: int) -> Callable[[jax.Array], jax.Array]:
    """Returns a function from the number of an update, 1 ... `steps`, to the learning rate.

    The warm-up is linear from `warmup_learning_rate` to `learning_rate`. After the warm-up,
    `config.schedule` determines the learning rate:

    - `constant`: it stays at `learning_rate`.
    - `linear`: it decays linearly to `end_learning_rate`.
    - `cosine`: it decays by half a cosine to `end_learning_rate`.
    - `polynomial`: it decays to `end_learning_rate` by a power of the remaining share of the run.
    - `stairs`: it is multiplied by `stair_factor` at each of `stairs`, which are shares of the run.

    `count_from` is the position of the first update in the schedule. With 1, the first update has a
    learning rate above zero, and the last update has `end_learning_rate`. With 0, each learning
    rate is used one update later, as in big_vision, vision_transformer and Optax.

    Raises:
      UserError: the warm-up is as long as the whole run.
    """
    base, end, warmup = config.learning_rate, config.end_learning_rate, config.warmup_steps
    if warmup >= steps and warmup > 0:
        raise UserError(
            f"optimizer.warmup_steps = {warmup} is not below the run's {steps} steps; "
            f"use fewer, such as {steps // 10}, or train longer"
        )
    stairs = jnp.array([round(share * steps) for share in config.stairs], jnp.float32)

    def schedule(t: jax.Array) -> jax.Array:
        t = jnp.asarray(t, jnp.float32) + (config.count_from - 1)
        progress = jnp.clip((t - warmup) / (steps - warmup), 0, 1)
        rate = {
            "linear": end + (base - end) * (1 - progress),
            "cosine": _half_cosine(base, end, progress),
            "polynomial": end + (base - end) * (1 - progress) ** config.power,
            "stairs": base * config.stair_factor ** (t > stairs).sum(),
            "constant": jnp.full_like(progress, base),
        }[config.schedule]
        if not warmup:
            return rate
        risen = jnp.minimum(1, t / warmup)
        return rate * risen + config.warmup_learning_rate * (1 - risen)

    return schedule


def make_backbone_schedule(
    config: OptimizerOptions, steps: int, frozen_steps: int, warmup_steps: int
) -> Callable[[jax.Array], jax.Array] | None:
    """Returns a function from the number of an update to the learning rate of the backbone.

    The learning rate is 0 for `frozen_steps` updates. Then the config's schedule starts, with a
    warm-up of `warmup_steps` from 0 (EoMT's `two_stage_warmup_poly_schedule.py`). Without a
    warm-up the result is None: the backbone has the config's schedule.

    Raises:
      UserError: the frozen steps and the warm-up are as long as the whole run.
    """
    if not warmup_steps:
        return None
    if frozen_steps + warmup_steps >= steps:
        raise UserError(
            f"finetune.frozen_steps = {frozen_steps} and finetune.warmup_steps = {warmup_steps} "
            f"are not below the run's {steps} steps; use fewer, or train longer"
        )
    backbone_config = dataclasses.replace(
        config, warmup_steps=warmup_steps, warmup_learning_rate=0.0
    )
    later = make_schedule(backbone_config, steps - frozen_steps)
    return lambda t: jnp.where(t > frozen_steps, later(jnp.maximum(t - frozen_steps, 1)), 0)


def make_weight_decay(
    config: OptimizerOptions, steps: int
) -> float | Callable[[jax.Array], jax.Array]:
    """Returns the weight decay, or a function of update t if it changes to `weight_decay_end`.

    The weight decay follows half a cosine over the whole run, including the warm-up. With
    `count_from` = 1, the last update has `weight_decay_end`. With `count_from` = 0, the first
    update has `weight_decay`, as in DINO and DINOv2.
    """
    base, end = config.weight_decay, config.weight_decay_end
    if end is None:
        return base

    def decay(t: jax.Array) -> jax.Array:
        t = jnp.asarray(t, jnp.float32) + (config.count_from - 1)
        return _half_cosine(base, end, jnp.clip(t / steps, 0, 1))

    return decay


def depends_on_steps(config: OptimizerOptions) -> bool:
    """Returns True if the learning rate or the weight decay depends on the length of the run."""
    return config.schedule != "constant" or config.weight_decay_end is not None


def _half_cosine(base: float, end: float, progress: jax.Array) -> jax.Array:
    return end + (base - end) * (1 + jnp.cos(jnp.pi * progress)) / 2
