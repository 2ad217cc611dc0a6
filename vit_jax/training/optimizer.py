"""Optimizer: gradient clipping, an update rule of `update_rules/`, weight decay, learning rates."""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.errors import UserError
from vit_jax.models import is_undecayed
from vit_jax.options.optimizer import OptimizerOptions
from vit_jax.parallel.sharding import path_name
from vit_jax.training.update_rules import make_update_rule
from vit_jax.training.update_rules.lamb import to_length

HEADS = "params/head", "params/distillation_head", "extra/objective"


def make_optimizer(
    config: OptimizerOptions,
    schedule: Callable[[jax.Array], jax.Array],
    *,
    weight_decay: float | Callable[[jax.Array], jax.Array],
    trained: Callable[[dict], dict] | None = None,
    layer: Callable[[str], float] | None = None,
    embedding: Sequence[str] = (),
    frozen_prefixes: Mapping[str, int] | None = None,
    stem: Sequence[str] = (),
    frozen_steps: int = 0,
    backbone_schedule: Callable[[jax.Array], jax.Array] | None = None,
) -> optax.GradientTransformation:
    """Chains gradient clipping, the update rule, weight decay and learning rates by layer.

    Weight decay is decoupled or coupled. Decoupled weight decay is added to the update (Loshchilov
    and Hutter, 2019). Coupled weight decay is added to the clipped gradient before the update rule,
    as in PyTorch's SGD.

    The optimizer's `update` has an argument `finite`: False means that the update is skipped. A
    skipped update advances the schedules, but not the update rule's state.

    Args:
      config: the section `optimizer`.
      schedule: the learning rate of update t = 1, 2, ...
      weight_decay: a constant, or a function of update t.
      trained: function from the weights to a mask, True for trained weights. None: all weights are
        trained. Weights that are not trained have no optimizer state.
      layer: function from a parameter's path to its layer (`Family.layer`), for `layer_decay`.
      embedding: path prefixes of the patch embedding (`Family.embedding`), for `embedding_rate`.
      frozen_prefixes: the parameters of the objective that are frozen in the first updates, as a
        dict from a prefix of their paths, such as `head/prototypes`, to the number of updates
        (`Objective.frozen_prefixes`).
      stem: path prefixes of the objective's parameters that are treated like the patch embedding.
      frozen_steps: number of initial updates in which the backbone is frozen, so that only the
        model's heads and the parameters of the objective are trained.
      backbone_schedule: the learning rate of update t for the backbone, that is, for all parameters
        except the model's heads and the parameters of the objective. None: `schedule`.

    Raises:
      UserError: the config sets `clip_update`, and the optimizer is not Adafactor.
    """
    if config.clip_update and config.name != "adafactor":
        raise UserError(
            f"config.optimizer.clip_update = {config.clip_update} is of "
            f"optimizer.name='adafactor', not of {config.name!r}; use 0, and optimizer.clip_norm "
            "for the gradient"
        )
    update_rule = unless_skipped(make_update_rule(config))
    # Optax counts from 0; the first update is t = 1.
    changing = (lambda count: weight_decay(count + 1)) if callable(weight_decay) else weight_decay
    decay = optax.add_decayed_weights(changing, mask=DECAYED[config.decay])
    # A disabled stage is either left out or has no state. Checkpoints of earlier versions, which
    # did not have these stages, can therefore be restored.
    slowed = [f"params/{start}" for start in embedding]
    stages = [
        clip_by_norm(config.clip_norm, config.clip) if config.clip_norm else optax.identity(),
        *((decay, update_rule) if config.coupled_decay else (update_rule, decay)),
        *([to_length(DECAYED[config.decay])] if config.name == "lamb" else []),
        scale_by_layer(config.layer_decay, layer, stem)
        if config.layer_decay < 1
        else optax.identity(),
        *_learning_rates(schedule, backbone_schedule),
    ]
    if config.embedding_rate != 1:
        stages.append(optax.masked(optax.scale(config.embedding_rate), partial(below, slowed)))
    whole = optax.chain(*stages, *_frozen_stages(frozen_prefixes or {}, frozen_steps))
    if trained is None:
        return whole
    return optax.partition({True: whole, False: optax.set_to_zero()}, trained)


def _learning_rates(
    schedule: Callable[[jax.Array], jax.Array],
    backbone_schedule: Callable[[jax.Array], jax.Array] | None,
) -> list[optax.GradientTransformation]:
    """Returns the last stages of the optimizer: multiplication by the learning rates.

    A schedule maps the number of an update, counted from 1, to the learning rate. If
    `backbone_schedule` is None, the backbone also uses `schedule`.
    """

    def scale(schedule):
        return optax.scale_by_learning_rate(lambda count: schedule(count + 1))

    if backbone_schedule is None:
        return [scale(schedule)]
    return [
        optax.masked(scale(schedule), partial(below, HEADS)),
        optax.masked(scale(backbone_schedule), _behind_heads),
    ]


def _frozen_stages(
    frozen_prefixes: Mapping[str, int], frozen_steps: int
) -> list[optax.GradientTransformation]:
    """Returns optimizer stages that freeze weights in the first updates.

    Args:
      frozen_prefixes: the parameters of the objective that are frozen in the first updates, as a
        dict from a prefix of their paths, such as `head/prototypes`, to the number of updates.
      frozen_steps: number of initial updates in which the backbone is frozen, so that only the
        model's heads and the parameters of the objective are trained.
    """
    stages = [
        _freeze(steps, partial(below, [f"extra/objective/{start}"]))
        for start, steps in frozen_prefixes.items()
    ]
    return stages + [_freeze(frozen_steps, _behind_heads)] * bool(frozen_steps)


def _freeze(steps: int, mask: Callable[[dict], dict]) -> optax.GradientTransformation:
    """Sets the first `steps` updates to 0 for the weights where `mask` returns True."""
    return optax.masked(optax.scale_by_schedule(lambda count: count >= steps), mask)


def unless_skipped(
    update_rule: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Returns an update rule whose state and step count stay unchanged in skipped updates.

    The function `update` of the returned rule has an additional argument, `finite`. If it is False,
    the update is skipped. If it is None, the update is skipped if the gradient is not finite.
    """

    def update(updates, state, params=None, *, finite=None):
        if finite is None:
            finite = jnp.isfinite(optax.tree.norm(updates))
        updates, new = update_rule.update(updates, state, params)
        return updates, jax.tree.map(partial(jnp.where, finite), new, state)

    return optax.GradientTransformationExtraArgs(update_rule.init, update)


def check_first(
    config: OptimizerOptions, changes: Callable[[dict], dict] | None, weights: dict
) -> None:
    """Raises UserError if LAMB would train an array of zeros.

    LAMB scales an array's update to the norm of the array. For an array of zeros this is
    impossible, because the norm of the array is 0. `changes` returns a mask, True for trained
    weights; None: all weights are trained.
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
                "config.optimizer.name='lamb' scales updates by an array's norm, and "
                f"{path_name(path)} starts at zeros; config.model.head_std=0.02 draws the "
                "head's first values, and optimizer.name='adam' takes any"
            )


def kernels(params: dict) -> dict:
    """Returns a mask: True for kernels of dense and convolution layers, named `kernel`."""
    return _named(params, lambda name: name == "kernel")


UNDECAYED = ("bias", "scale", "scale1", "scale2", "logit_bias", "logit_scale")


def tables(params: dict) -> dict:
    """Returns a mask: True for kernels, relative position bias tables and the mask token.

    Position embeddings, class tokens, biases and scales have no weight decay, as in the code of
    BEiT and EVA.
    """
    return _named(params, lambda name: name in ("kernel", "bias_table", "mask"))


def matrices(params: dict) -> dict:
    """Returns a mask: False for biases, scales, and the logits' scale and bias, else True.

    Kernels, tokens, position embeddings and tables are thus True. The mask corresponds to PyTorch
    code that applies weight decay to all parameters with more than one axis.
    """
    return _named(params, lambda name: name not in UNDECAYED)


def _named(params: dict, decays: Callable[[str], bool]) -> dict:
    """Returns a mask of the parameters with weight decay.

    Parameters that the model family excludes from weight decay are False.

    Args:
      decays: function from the last name of a parameter's path, such as `bias`, to True if the
        parameter has weight decay.
    """

    def both(path, _):
        return decays(path[-1].key) and not is_undecayed(path_name(path))

    return jax.tree.map_with_path(both, params)


DECAYED = {"kernels": kernels, "tables": tables, "matrices": matrices, "all": None}


def below(starts: Sequence[str], weights: dict) -> dict:
    """Returns a mask: True for weights whose path starts with one of the paths in `starts`."""

    def begins(path, _):
        return any(f"{path_name(path)}/".startswith(f"{start}/") for start in starts)

    return jax.tree.map_with_path(begins, weights)


def _behind_heads(weights: dict) -> dict:
    """Returns a mask: True for the backbone, False for heads and parameters of the objective."""
    return jax.tree.map(operator.not_, below(HEADS, weights))


def clip_by_norm(norm: float, of: str) -> optax.GradientTransformation:
    """Scales gradients down to a maximum norm.

    Args:
      norm: the maximum norm.
      of: the arrays over which a norm is computed. `global`: all arrays. `tensor`: each array
        separately. `module`: the whole model, and each top-level module of the objective's
        parameters separately. With `tensor` and `module` the gradient is multiplied by min(1, norm
        / (gradient norm + 1e-6)), as in PyTorch, DINO and DINOv2.
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
    decay: float, layer_number: Callable[[str], float], stem: Sequence[str] = ()
) -> optax.GradientTransformation:
    """Multiplies the updates of encoder layer 0, 1, ... by `decay ** (depth - layer)`.

    The factor of the last encoder layer is thus `decay`. Parameters before the encoder, such as the
    patch embedding or a hybrid's ResNet, have the factor `decay ** (depth + 1)`. Parameters after
    the encoder and an objective's decoder have the factor 1 (BEiT, 2106.08254; MAE, 2111.06377,
    appendix A.2). An objective's mask token is treated like the patch embedding (DINOv2's
    `param_groups.py`). In axial attention, a row layer and a column layer count as one layer.

    Args:
      decay: factor per layer.
      layer_number: function from the path of a model parameter to the number of its encoder layer
        (`Family.layer`).
      stem: path prefixes of the objective's parameters that are treated like the patch embedding.
    """

    def scale(updates, params=None):
        del params
        layers = jax.tree.map_with_path(
            lambda path, _: layer_of(layer_number, path_name(path), stem), updates
        )
        depth = 1 + max(
            (layer for layer in jax.tree.leaves(layers) if layer < math.inf), default=-1
        )
        return jax.tree.map(
            lambda x, layer: x * decay ** (depth - min(layer, depth)), updates, layers
        )

    return optax.stateless(scale)


def layer_of(layer_number: Callable[[str], float], path: str, stem: Sequence[str] = ()) -> float:
    """Returns the encoder layer of a weight; -1 before the encoder, infinity after it.

    Args:
      layer_number: function from the path of a model parameter to the number of its encoder layer
        (`Family.layer`).
      path: a path in a run's weights, such as `params/blocks/00/norm1/scale`.
      stem: path prefixes of the objective's parameters that are treated like the patch embedding.
    """
    if path.startswith("extra/objective/"):  # Includes the layers of an objective's decoder.
        param_path = path.removeprefix("extra/objective/")
        return -1 if any(f"{param_path}/".startswith(f"{start}/") for start in stem) else math.inf
    if path.startswith("extra/lora/"):  # Low-rank updates have the name of their kernel.
        return layer_number(path.removeprefix("extra/lora/").replace(".", "/"))
    return layer_number(path.removeprefix("params/"))
