"""The optimizer: gradient clipping, a direction of `directions/`, weight decay, learning rates."""

import math
from collections.abc import Callable

import jax
import optax
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.models import is_undecayed
from vit_jax.options import Option, flag, number, one_of
from vit_jax.parallel.sharding import path_name
from vit_jax.training.directions import direction_of

OPTIONS = {
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


def make_optimizer(
    config: ConfigDict,
    schedule: Callable[[jax.Array], jax.Array],
    trained: Callable[[dict], dict] | None = None,
    layer: Callable[[str], float] | None = None,
) -> optax.GradientTransformation:
    """Clip by global norm, the direction that is named, weight decay, learning rate by layer.

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
    direction = direction_of(config)
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


def kernels(params: dict) -> dict:
    """True for the weights of dense and convolution layers: by name, whatever their rank."""
    return _named(params, lambda name: name == "kernel")


def matrices(params: dict) -> dict:
    """True for all but biases and scales: what has more than one axis in PyTorch, tokens and tables too."""
    return _named(params, lambda name: name not in ("bias", "scale", "scale1", "scale2"))


def _named(params: dict, decays: Callable[[str], bool]) -> dict:
    """True for parameters whose own name decays, and which no family keeps out of it."""

    def both(path, _):
        return decays(path[-1].key) and not is_undecayed(path_name(path))

    return jax.tree.map_with_path(both, params)


DECAYED = {"kernels": kernels, "matrices": matrices, "all": None}


def scale_by_layer(decay: float, layer: Callable[[str], float]) -> optax.GradientTransformation:
    """Updates of an encoder layer times `decay` for each layer between it and the head.

    What comes before the encoder counts as one layer, a hybrid's ResNet too; a row layer and a column layer
    of axial attention are one; what comes behind the encoder keeps its rate, as does an objective's decoder
    (BEiT, 2106.08254; MAE, 2111.06377, appendix A.2).

    Args:
      layer: of a family's model, by a parameter's path in it.
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
      layer: of a family's model, by a parameter's path in it.
      path: among a run's weights: `params/blocks/00/norm1/scale`.
    """
    if path.startswith("extra/objective/"):  # A decoder's layers too.
        return math.inf
    if path.startswith("extra/lora/"):  # Low-rank changes are named by the kernel that they change.
        return layer(path.removeprefix("extra/lora/").replace(".", "/"))
    return layer(path.removeprefix("params/"))
