"""Weights of a training run, including LoRA's low-rank updates (Hu et al., 2022).

A run's weights are a dict with two items. `params` contains the model's parameters. `extra`
contains weights that only training uses: `lora`, low-rank updates of kernels, and `objective`, the
objective's own parameters, such as a decoder's.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import logical_axes
from vit_jax.models.family import Axes
from vit_jax.options.run import FinetuneOptions
from vit_jax.parallel.sharding import path_name

Weights = dict[str, dict]

CHANGED_BY_LORA = r"(^|/)attention/(qkv|out)/kernel$"


def init_extra(options: FinetuneOptions, seed: int, params: dict) -> dict:
    """Returns the initial low-rank updates of LoRA, which are part of the weights `extra`.

    `extra` contains the weights that only training uses. The result is `{"lora": updates}`, or `{}`
    if the config does not use LoRA. `updates` is a dict with an entry for each attention kernel, by
    the kernel's path. The entry contains two matrices, `down` and `up`; their product is the
    kernel's low-rank update. Each `up` is initially zero, so LoRA does not change the model before
    the first training step.

    Args:
      seed: random seed of the matrices `down`.

    Raises:
      UserError: the model has no attention kernels for LoRA.
    """
    if options.train != "lora":
        return {}
    rank, key = options.lora_rank, jax.random.key(seed)
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
    """Returns the logical axes of a weight, or None if it has none.

    A low-rank update consists of `down` and `up`. `down` has the kernel's input axes and the axis
    `rank`. `up` has the axis `rank` and the kernel's output axes. `path` starts with `params/` or
    `extra/`.
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
    """Returns the objective's own parameters from a run's weights; {} if the objective has none."""
    return weights["extra"].get("objective", {})


def with_frozen(objective_params: dict, frozen: dict) -> dict:
    """Adds the item `frozen`, the frozen model's parameters, to an objective's own parameters."""
    return objective_params | ({"frozen": frozen} if frozen else {})


def effective(weights: Weights) -> dict:
    """Returns the parameters for the forward pass.

    With LoRA, the product of `down` and `up` is added to each kernel that has a low-rank update.
    """
    lora = weights["extra"].get("lora", {})

    def changed(path, kernel):
        factors = lora.get(path_name(path).replace("/", "."))
        return (
            kernel if factors is None else kernel + jnp.tensordot(factors["down"], factors["up"], 1)
        )

    return jax.tree.map_with_path(changed, weights["params"])


def trained(options: FinetuneOptions, weights: Weights) -> Weights:
    """Returns a tree like `weights`: True for weights that the optimizer updates, else False."""
    patterns = {"all": "", "objective": r"extra/objective/"}
    pattern = patterns.get(options.train, r"extra/|params/(head|distillation_head)/")

    def is_trained(path, _):
        return re.match(pattern, path_name(path)) is not None

    return jax.tree.map_with_path(is_trained, weights)
