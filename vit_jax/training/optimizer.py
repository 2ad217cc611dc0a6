"""The optimizer: gradient clipping, a direction of `directions/`, weight decay, learning rates."""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.models import is_undecayed
from vit_jax.parallel.sharding import path_name
from vit_jax.training.directions import direction_of
from vit_jax.training.directions.lamb import to_length

HEADS = "params/head", "params/distillation_head"


def make_optimizer(
    config: ConfigDict,
    schedule: Callable[[jax.Array], jax.Array],
    weight_decay: float | Callable[[jax.Array], jax.Array],
    trained: Callable[[dict], dict] | None = None,
    layer: Callable[[str], float] | None = None,
    embedding: Sequence[str] = (),
    frozen_prefixes: Mapping[str, int] | None = None,
    stem: Sequence[str] = (),
    frozen_steps: int = 0,
) -> optax.GradientTransformation:
    """Clip by norm, the direction that is named, weight decay, learning rate by layer.

    Its `update` takes `finite`, as of `unless_skipped`: only the schedules count a skipped one.

    Weight decay is decoupled, added to the direction (Loshchilov and Hutter, 2019), or coupled,
    added to the clipped gradient from which the direction is made, as in PyTorch's SGD.

    Args:
      schedule: the learning rate of update t = 1, 2, ...
      weight_decay: the same for all updates, or that of update t.
      trained: of weights, True for those that change; None: all. For the others nothing is kept.
      layer: the model family's, for `layer_decay`.
      embedding: the model family's, for `embedding_rate`.
      frozen_prefixes: `Objective.frozen_prefixes`.
      stem: the objective's: starts of the paths of its own parameters that enter before the
        encoder.
      frozen_steps: for so many first updates the rate of all but the heads is 0.

    Raises:
      UserError: `clip_update` for another optimizer than Adafactor.
    """
    if config.clip_update and config.name != "adafactor":
        raise UserError(
            f"config.optimizer.clip_update = {config.clip_update} is of "
            f"optimizer.name='adafactor', not of {config.name!r}; use 0, and optimizer.clip_norm "
            "for the gradient"
        )
    direction = unless_skipped(direction_of(config))
    # Optax counts from 0; the first update is t = 1.
    changing = (lambda count: weight_decay(count + 1)) if callable(weight_decay) else weight_decay
    decay = optax.add_decayed_weights(changing, mask=DECAYED[config.decay])
    # A stage that is not asked for is left out or has no state: states of earlier versions are
    # restored.
    slowed = [f"params/{start}" for start in embedding]
    stages = [
        clip_by_norm(config.clip_norm, config.clip) if config.clip_norm else optax.identity(),
        *((decay, direction) if config.coupled_decay else (direction, decay)),
        *([to_length(DECAYED[config.decay])] if config.name == "lamb" else []),
        scale_by_layer(config.layer_decay, layer, stem)
        if config.layer_decay < 1
        else optax.identity(),
        optax.scale_by_learning_rate(lambda count: schedule(count + 1)),
    ]
    if config.embedding_rate != 1:
        stages.append(optax.masked(optax.scale(config.embedding_rate), partial(below, slowed)))
    whole = optax.chain(*stages, *_frozen_stages(frozen_prefixes or {}, frozen_steps))
    if trained is None:
        return whole
    return optax.partition({True: whole, False: optax.set_to_zero()}, trained)


def _frozen_stages(
    frozen_prefixes: Mapping[str, int], frozen_steps: int
) -> list[optax.GradientTransformation]:
    """Returns the stages that freeze weights in the first steps; as of `make_optimizer`."""
    stages = [
        _freeze(steps, partial(below, [f"extra/objective/{start}"]))
        for start, steps in frozen_prefixes.items()
    ]
    return stages + [_freeze(frozen_steps, _behind_heads)] * bool(frozen_steps)


def _freeze(steps: int, mask: Callable[[dict], dict]) -> optax.GradientTransformation:
    """Sets the first updates of some weights to 0.

    Args:
      steps: number of updates that are 0.
      mask: returns True for these weights.
    """
    return optax.masked(optax.scale_by_schedule(lambda count: count >= steps), mask)


def unless_skipped(
    direction: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """A direction whose whole state, its count of updates included, stays as it is in a skipped
    update.

    Its `update` takes `finite`, False for a skipped update; None: whether the gradient is finite.
    """

    def update(updates, state, params=None, *, finite=None):
        if finite is None:
            finite = jnp.isfinite(optax.tree.norm(updates))
        updates, new = direction.update(updates, state, params)
        return updates, jax.tree.map(partial(jnp.where, finite), new, state)

    return optax.GradientTransformationExtraArgs(direction.init, update)


def check_first(config: ConfigDict, changes: Callable[[dict], dict] | None, weights: dict) -> None:
    """Raises UserError where LAMB would start from zeros, which it hardly moves: it goes by their
    length.

    Args:
      config: the section `optimizer`.
      changes: as `make_optimizer`'s `trained`.
      weights: a run's first.
    """
    if config.name != "lamb":
        return
    chosen = [choose(weights) for choose in (DECAYED[config.decay], changes) if choose]
    moved = jax.tree.map(lambda _, *flags: all(flags), weights, *chosen)
    for (path, x), scaled in zip(
        jax.tree.leaves_with_path(weights), jax.tree.leaves(moved), strict=True
    ):
        if scaled and not np.any(x):
            raise UserError(
                "config.optimizer.name='lamb' changes an array by its length, and "
                f"{path_name(path)} starts at zeros; config.model.head_std=0.02 draws the "
                "head's first values, and optimizer.name='adam' takes any"
            )


def kernels(params: dict) -> dict:
    """True for the weights of dense and convolution layers: by name, whatever their rank."""
    return _named(params, lambda name: name == "kernel")


def tables(params: dict) -> dict:
    """True for kernels, for tables of biases by offset, and for an objective's token of masked
    patches.

    Positions, class tokens, biases and scales do not decay, as in the code of BEiT and EVA.
    """
    return _named(params, lambda name: name in ("kernel", "bias_table", "mask"))


def matrices(params: dict) -> dict:
    """True for all but biases and scales: what has more than one axis in PyTorch, tokens and tables
    too.
    """
    return _named(params, lambda name: name not in ("bias", "scale", "scale1", "scale2"))


def _named(params: dict, decays: Callable[[str], bool]) -> dict:
    """True for parameters whose own name decays, and which no family keeps out of it."""

    def both(path, _):
        return decays(path[-1].key) and not is_undecayed(path_name(path))

    return jax.tree.map_with_path(both, params)


DECAYED = {"kernels": kernels, "tables": tables, "matrices": matrices, "all": None}


def below(starts: Sequence[str], weights: dict) -> dict:
    """True for the weights whose paths are one of `starts` or go on from it."""

    def begins(path, _):
        return any(f"{path_name(path)}/".startswith(f"{start}/") for start in starts)

    return jax.tree.map_with_path(begins, weights)


def _behind_heads(weights: dict) -> dict:
    """True for all weights but those of the model's heads."""
    return jax.tree.map(operator.not_, below(HEADS, weights))


def clip_by_norm(norm: float, of: str) -> optax.GradientTransformation:
    """Gradients made so much smaller that a norm is not above `norm`.

    Args:
      of: what has one norm: `global`, all; `tensor`, each array; `module`, the model, and each part
        of the objective by the first name below its own parameters. Parts are multiplied by norm /
        (their norm + 1e-6) where that is below 1, as in PyTorch, DINO and DINOv2.
    """
    if of == "global":
        return optax.clip_by_global_norm(norm)

    def part_of(path) -> str:
        name = path_name(path)
        if of == "tensor":
            return name
        return name.split("/")[2] if name.startswith("extra/objective/") else ""

    def clip(updates, params=None):
        del params
        squares = defaultdict(float)
        for path, x in jax.tree.leaves_with_path(updates):
            squares[part_of(path)] += jnp.square(x).sum()
        factors = {part: jnp.minimum(1, norm / (jnp.sqrt(x) + 1e-6)) for part, x in squares.items()}
        return jax.tree.map_with_path(lambda path, x: x * factors[part_of(path)], updates)

    return optax.stateless(clip)


def scale_by_layer(
    decay: float, layer: Callable[[str], float], stem: Sequence[str] = ()
) -> optax.GradientTransformation:
    """Updates of an encoder layer times `decay` for each layer between it and the head.

    What comes before the encoder counts as one layer, a hybrid's ResNet too; a row layer and a
    column layer of axial attention are one; what comes behind the encoder keeps its rate, as does
    an objective's decoder (BEiT, 2106.08254; MAE, 2111.06377, appendix A.2). An objective's token
    of masked patches is of the layer before the encoder (DINOv2's `param_groups.py`).

    Args:
      layer: of a family's model, by a parameter's path in it.
      stem: starts of the paths of an objective's parameters that enter before the encoder.
    """

    def scale(updates, params=None):
        del params
        layers = jax.tree.map_with_path(
            lambda path, _: layer_of(layer, path_name(path), stem), updates
        )
        depth = 1 + max(
            (layer for layer in jax.tree.leaves(layers) if layer < math.inf), default=-1
        )
        return jax.tree.map(
            lambda x, layer: x * decay ** (depth - min(layer, depth)), updates, layers
        )

    return optax.stateless(scale)


def layer_of(layer: Callable[[str], float], path: str, stem: Sequence[str] = ()) -> float:
    """The number of the encoder layer of one of a run's weights; -1 before them, infinity behind.

    Args:
      layer: of a family's model, by a parameter's path in it.
      path: among a run's weights: `params/blocks/00/norm1/scale`.
      stem: as of `scale_by_layer`.
    """
    if path.startswith("extra/objective/"):  # A decoder's layers too.
        own = path.removeprefix("extra/objective/")
        return -1 if any(f"{own}/".startswith(f"{start}/") for start in stem) else math.inf
    if path.startswith("extra/lora/"):  # Low-rank changes are named by the kernel that they change.
        return layer(path.removeprefix("extra/lora/").replace(".", "/"))
    return layer(path.removeprefix("params/"))
