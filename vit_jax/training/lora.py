"""A run's weights: what of them is trained, and what the model computes with.

They are `{"params", "extra"}`: the model's own, and those that only training has: `lora`, low-rank
changes (Hu et al., 2022), and `objective`, what the objective has beyond the model.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.models import logical_axes
from vit_jax.models.family import Axes
from vit_jax.parallel.sharding import path_name

Weights = dict[str, dict]

CHANGED_BY_LORA = r"(^|/)attention/(qkv|out)/kernel$"


def init_extra(config: ConfigDict, params: dict) -> dict:
    """The weights that only training has; `lora` starts so that it changes nothing."""
    if config.finetune.train != "lora":
        return {}
    rank, key = config.finetune.lora_rank, jax.random.key(config.seed)
    lora = {}
    for number, (path, kernel) in enumerate(jax.tree.leaves_with_path(params)):
        name = path_name(path)
        if re.search(CHANGED_BY_LORA, name):
            inputs = logical_axes(name, kernel.ndim).inputs
            ins, outs = kernel.shape[:inputs], kernel.shape[inputs:]
            draw = jax.nn.initializers.normal(np.prod(ins) ** -0.5)
            lora[name.replace("/", ".")] = {
                "down": draw(jax.random.fold_in(key, number), (*ins, rank)),
                "up": jnp.zeros((rank, *outs)),
            }
    if not lora:
        raise UserError(
            "config.finetune.train='lora' changes attention's products, and the model has none"
        )
    return {"lora": lora}


def weight_axes(path: str, rank: int) -> Axes | None:
    """The logical axes of one of a run's weights, by its path: `params/...` or `extra/...`.

    A low-rank change has its kernel's inputs and a `rank`, or a `rank` and the outputs.
    """
    kernel, _, factor = path.removeprefix("extra/lora/").partition("/")
    if not path.startswith("extra/lora/"):
        return logical_axes(path, rank)
    for kernel_rank in range(2, 5):
        if axes := logical_axes(kernel.replace(".", "/"), kernel_rank):
            names = axes.names[: axes.inputs] + ("rank",), ("rank",) + axes.names[axes.inputs :]
            return Axes(names[0], axes.inputs) if factor == "down" else Axes(names[1], 1)
    return None


def objective_weights(weights: Weights) -> dict:
    """The objective's own."""
    return weights["extra"].get("objective", {})


def with_frozen(own: dict, frozen: dict) -> dict:
    """All parameters of an objective: its own, and those of its frozen model, if it has one."""
    return own | ({"frozen": frozen} if frozen else {})


def effective(weights: Weights) -> dict:
    """The parameters that the model computes with: kernel + down x up where there is a low-rank
    change.
    """
    lora = weights["extra"].get("lora", {})

    def changed(path, kernel):
        factors = lora.get(path_name(path).replace("/", "."))
        return (
            kernel if factors is None else kernel + jnp.tensordot(factors["down"], factors["up"], 1)
        )

    return jax.tree.map_with_path(changed, weights["params"])


def trained(config: ConfigDict, weights: Weights) -> Weights:
    """True for the weights that training changes."""
    everything = config.finetune.train == "all"

    def is_trained(path, _):
        return (
            everything
            or re.match(r"extra/|params/(head|distillation_head)/", path_name(path)) is not None
        )

    return jax.tree.map_with_path(is_trained, weights)
