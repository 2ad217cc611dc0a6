"""Learning-rate schedule and optimizer (paper, section 4.1 and table 3)."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.options import RATE, Option, flag, number, one_of, several, whole
from vit_jax.parallel.sharding import path_name
from vit_jax.training.lora import weight_axes

OPTIONS = {
    "optimizer.name": Option("adam", one_of("adam", "adafactor", "sgd"), "The optimizer."),
    "optimizer.learning_rate": Option(1e-3, number(least=0), "The highest rate, after the warm-up."),
    "optimizer.end_learning_rate": Option(0.0, number(least=0), "The rate of the last update."),
    "optimizer.schedule": Option(
        "cosine", one_of("linear", "cosine", "constant", "stairs"), "How the rate falls."
    ),
    "optimizer.stairs": Option(
        (0.3, 0.6, 0.9),
        several(number(above=0, below=1), least=1, ascending=True),
        "Shares of the run after which the rate of stairs falls; BiT's are these.",
    ),
    "optimizer.stair_factor": Option(0.1, number(above=0, most=1), "Factor on the rate at each stair."),
    "optimizer.count_from": Option(
        1, whole(0, 1), "Number of the first update in the schedule; 0 in big_vision, Optax and others."
    ),
    "optimizer.warmup_steps": Option(10_000, whole(0), "Steps in which the rate rises linearly."),
    "optimizer.beta1": Option(0.9, RATE, "Decay of the first moment; momentum, for sgd."),
    "optimizer.beta2": Option(0.999, RATE, "Decay of the second moment."),
    "optimizer.epsilon": Option(1e-8, number(least=0, most=1), "Added to the root of the second moment."),
    "optimizer.moment_dtype": Option(
        "float32", one_of("float32", "bfloat16"), "Type of the first moment, or momentum."
    ),
    "optimizer.clip_update": Option(
        0.0, number(least=0), "Adafactor: highest RMS of a kernel's update before momentum; 0: off."
    ),
    "optimizer.clip_update_of": Option(
        "projection",
        one_of("projection", "array"),
        "That of q, k and v apart, or of the array that they lie in.",
    ),
    "optimizer.weight_decay": Option(0.1, number(least=0), "Times the learning rate and the parameter."),
    "optimizer.coupled_decay": Option(
        False,
        flag(),
        "Decay the gradient, as BiT does: with momentum 0.9 ten times as strong.",
    ),
    "optimizer.decay": Option(
        "kernels",
        one_of("kernels", "matrices", "all"),
        "Which parameters decay; matrices are all but biases and scales.",
    ),
    "optimizer.clip_norm": Option(1.0, number(least=0), "Global norm of the gradient; 0: off."),
    "optimizer.layer_decay": Option(
        1.0, number(above=0, most=1), "Factor on the learning rate for each layer below the head."
    ),
}


def make_schedule(config: ConfigDict, steps: int) -> Callable[[jax.Array], jax.Array]:
    """The learning rate of update t = 1 ... `steps`.

    Linear warm-up times a decay of `learning_rate`: linear or cosine, down to `end_learning_rate`; by stairs,
    a factor after each of so many shares of the run; or none. The first update is number `count_from` of the
    schedule: counted from 1 its rate is above zero and the last one has the end rate; counted from 0 each
    update has the rate that it has in big_vision, vision_transformer and Optax, one update later.

    Raises:
      UserError: warm-up as long as the whole run.
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
            "cosine": end + (base - end) * (1 + jnp.cos(jnp.pi * progress)) / 2,
            "stairs": base * config.stair_factor ** (t > stairs).sum(),
            "constant": jnp.full_like(progress, base),
        }[config.schedule]
        return rate * jnp.minimum(1, t / warmup) if warmup else rate

    return schedule


def make_optimizer(
    config: ConfigDict,
    schedule: Callable[[jax.Array], jax.Array],
    trained: Callable[[dict], dict] | None = None,
    layer: Callable[[str], float] | None = None,
) -> optax.GradientTransformation:
    """Clip by global norm, a direction of `DIRECTIONS`, weight decay, learning rate by layer.

    Weight decay is decoupled, added to the direction (Loshchilov and Hutter, 2019), or coupled, added to the
    clipped gradient from which the direction is made, as in PyTorch's SGD.

    Args:
      trained: of weights, True for those that change; None: all. For the others nothing is kept.
      layer: the model family's, for `layer_decay`.

    Raises:
      UserError: `clip_update` for another optimizer than Adafactor.
    """
    if config.clip_update and config.name != "adafactor":
        raise UserError(
            f"config.optimizer.clip_update = {config.clip_update} is of optimizer.name='adafactor', not of "
            f"{config.name!r}; use 0, and optimizer.clip_norm for the gradient"
        )
    direction = DIRECTIONS[config.name](config)
    decay = optax.add_decayed_weights(config.weight_decay, mask=DECAYED[config.decay])
    whole = optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        *((decay, direction) if config.coupled_decay else (direction, decay)),
        scale_by_layer(config.layer_decay, layer) if config.layer_decay < 1 else optax.identity(),
        # Optax counts from 0; the first update is t = 1.
        optax.scale_by_learning_rate(lambda count: schedule(count + 1)),
    )
    if trained is None:
        return whole
    return optax.partition({True: whole, False: optax.set_to_zero()}, trained)


def adam(config: ConfigDict) -> optax.GradientTransformation:
    """Adam's direction (Kingma and Ba, 2015).

    `moment_dtype` is of the first moment only: a second moment in bfloat16 would stand still, since its steps
    of 1 / 1000 are below bfloat16's rounding.
    """
    moment = jnp.dtype(config.moment_dtype)
    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon, mu_dtype=moment)


def adafactor(config: ConfigDict) -> optax.GradientTransformation:
    """Adafactor's direction in "Scaling Vision Transformers" (Zhai et al., 2022, section 3.5) and big_vision.

    It keeps sums over rows and columns in place of the second moment, with a decay up to beta2; it has
    momentum, and does not scale by the parameters. `clip_update` bounds its updates as the original does,
    at 1 (Shazeer and Stern, 2018).
    """
    return optax.chain(
        # Of the two largest axes of 32 or more, which never are those of q, k and v.
        optax.scale_by_factored_rms(
            min_dim_size_to_factor=32,
            decay_rate_fn=lambda step, power: jnp.minimum(config.beta2, 1 - (step + 1.0) ** -power),
        ),
        clip_by_rms(config.clip_update, config.clip_update_of),
        optax.ema(config.beta1, debias=False, accumulator_dtype=jnp.dtype(config.moment_dtype)),
    )


def momentum(config: ConfigDict) -> optax.GradientTransformation:
    """The gradient with momentum `beta1`."""
    return optax.trace(decay=config.beta1, accumulator_dtype=jnp.dtype(config.moment_dtype))


# The direction of an update by `optimizer.name`, before weight decay and the learning rate.
DIRECTIONS: dict[str, Callable[[ConfigDict], optax.GradientTransformation]] = {
    "adam": adam,
    "adafactor": adafactor,
    "sgd": momentum,
}


def clip_by_rms(limit: float, of: str) -> optax.GradientTransformation:
    """Updates whose root mean square is at most `limit`.

    Args:
      limit: 0: none.
      of: `array`, each for itself, or `projection`: so too the parts of one array that published code keeps
        in several, as q, k and v. The result is then the same however they are stored.
    """

    def clip(path, x):
        name = path_name(path)
        axes = weight_axes(name, x.ndim)
        apart = [] if axes is None else [axis for axis, kind in enumerate(axes.names) if kind == "part"]
        together = [axis for axis in range(x.ndim) if of == "array" or axis not in apart]
        rms = jnp.sqrt(jnp.square(x).mean(axis=tuple(together), keepdims=True))
        return x / jnp.maximum(1, rms / limit)

    if not limit:
        return optax.identity()
    return optax.stateless(lambda updates, params=None: jax.tree.map_with_path(clip, updates))


def kernels(params: dict) -> dict:
    """True for the weights of dense and convolution layers: by name, whatever their rank."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key == "kernel", params)


def matrices(params: dict) -> dict:
    """True for all but biases and scales: what has more than one axis in PyTorch, tokens and tables too."""
    vectors = ("bias", "scale", "scale1", "scale2")
    return jax.tree.map_with_path(lambda path, _: path[-1].key not in vectors, params)


DECAYED = {"kernels": kernels, "matrices": matrices, "all": None}


def scale_by_layer(decay: float, layer: Callable[[str], float]) -> optax.GradientTransformation:
    """Updates of an encoder layer times `decay` for each layer between it and the head.

    What comes before the encoder counts as one layer, a hybrid's ResNet too; a row layer and a column layer
    of axial attention are one; what comes behind the encoder keeps its rate, as does an objective's decoder
    (BEiT, 2106.08254; MAE, 2111.06377, appendix A.2).

    Args:
      layer: a family's, by a parameter's path in the model.
    """

    def scale(updates, params=None):
        del params
        layers = jax.tree.map_with_path(lambda path, _: layer_of(layer, path_name(path)), updates)
        depth = 1 + max((layer for layer in jax.tree.leaves(layers) if layer < math.inf), default=-1)
        return jax.tree.map(lambda x, layer: x * decay ** (depth - min(layer, depth)), updates, layers)

    return optax.stateless(scale)


def layer_of(layer: Callable[[str], float], path: str) -> float:
    """The number of the encoder layer of one of a run's weights; -1 before them, infinity behind.

    Args:
      layer: a family's, by a parameter's path in the model.
      path: among a run's weights: `params/blocks/00/norm1/scale`.
    """
    if path.startswith("extra/objective/"):  # A decoder's layers too.
        return math.inf
    if path.startswith("extra/lora/"):  # Low-rank changes are named by the kernel that they change.
        return layer(path.removeprefix("extra/lora/").replace(".", "/"))
    return layer(path.removeprefix("params/"))
