"""Converts the projection heads in the authors' checkpoints of DINO, iBOT and DINOv2.

A head consists of an MLP of three layers, `head.mlp.{0,2,4}`, and of prototypes, `head.last_layer`.
The prototypes are stored by PyTorch's weight_norm (`weight_g`, `weight_v`), or as a plain weight in
DINOv3. DINOv2 has the head `dino_head`, and may have a separate head `ibot_head` for patches. iBOT
has one MLP with two sets of prototypes, for images and for patches. The state of the objective
contains running means of the teacher's outputs, such as `dino_loss.center`.
"""

import re
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError

Arrays = dict[str, np.ndarray]

OWNS = re.compile(
    r"(dino_head|ibot_head|head)\.(mlp|last_layer)|mask_token$|masked_embed$|\w+_loss\.center"
)
_CENTRES = {
    "centre": ("dino_loss.center", "ibot_loss.center"),
    "patch_centre": ("ibot_patch_loss.center", "ibot_loss.center2"),
}


class Heads(NamedTuple):
    """The projection heads in a file.

    Attributes:
      values: values of `config.objective` that create such heads.
      params: parameters of the heads by vit_jax's paths.
      state: state of the objective, by name.
      notes: lines for the user about the conversion.
    """

    values: dict[str, Any]
    params: Arrays
    state: Arrays
    notes: list[str]


def read_heads(tensors: Arrays) -> Heads | None:
    """Converts the projection heads among the tensors of a file; returns None if there are none.

    Raises:
      UserError: the heads are unsupported.
    """
    tensors = {_old_name(name): array for name, array in tensors.items()}
    prefix = next((p for p in ("dino_head", "head") if f"{p}.mlp.0.weight" in tensors), None)
    if prefix is None:
        return None
    heads = {"head": _head(tensors, prefix, "last_layer")}
    patch_head, notes = _patch_head(tensors, heads["head"])
    if patch_head is not None:
        heads["patch_head"] = patch_head
    values = _options(heads)
    params = {
        f"{name}/{path}": array for name, head in heads.items() for path, array in head.items()
    }
    for name in ("mask_token", "masked_embed"):
        if name in tensors:
            params["mask"] = tensors[name].reshape(1, 1, -1)
    state = _centres(tensors)
    names = dict.fromkeys([*(path.partition("/")[0] for path in params), *state])
    notes.append(f"kept, of pre-training: {', '.join(names)}")
    return Heads(values, params, state, notes)


def _patch_head(tensors: Arrays, head: Arrays) -> tuple[Arrays | None, list[str]]:
    """Returns the head for patches (None if patches use the head for images), and notes."""
    if "ibot_head.mlp.0.weight" in tensors:
        return _head(tensors, "ibot_head", "last_layer"), []
    if not any(name.startswith("head.last_layer2.") for name in tensors):
        return None, []
    second = _head(tensors, "head", "last_layer2")
    if all(np.array_equal(second[path], array) for path, array in head.items()):
        return None, []
    note = "head.last_layer2 becomes a head of its own for patches, with a copy of head.mlp"
    return second, [note]


def _options(heads: dict[str, Arrays]) -> dict[str, Any]:
    """Returns the objective's options for the heads; deletes their parameter `gains` if all are 1.

    Raises:
      UserError: the heads differ in the width of the MLP, or only one of them has gains.
    """
    lengths = _prototype_lengths(heads)
    if lengths == "one":
        for head in heads.values():
            del head["gains"]
    widths = {head["layers/0/kernel"].shape[1] for head in heads.values()}
    if len(widths) > 1:
        raise UserError(f"their MLPs are of two widths, {' and '.join(map(str, sorted(widths)))}")
    bottleneck, prototypes = heads["head"]["prototypes"].shape
    values = dict(head_hidden=widths.pop(), bottleneck=bottleneck, prototypes=prototypes)
    values |= dict(prototype_lengths=lengths, patch_prototypes=None)
    if "patch_head" in heads:
        bottleneck, prototypes = heads["patch_head"]["prototypes"].shape
        values |= dict(patch_prototypes=prototypes, patch_bottleneck=bottleneck)
    return values


def _prototype_lengths(heads: dict[str, Arrays]) -> str:
    """Returns the option `prototype_lengths`.

    - `free`: the heads have no parameter `gains`, the lengths of the prototypes.
    - `one`: all gains are 1.
    - `learned`: some gains differ from 1.

    Raises:
      UserError: only one of the heads has gains.
    """
    gains = [head["gains"] for head in heads.values() if "gains" in head]
    if not gains:
        return "free"
    if len(gains) < len(heads):
        raise UserError("one has its prototypes' lengths apart, and the other not")
    return "learned" if any((x != 1).any() for x in gains) else "one"


def _centres(tensors: Arrays) -> Arrays:
    """Returns the running means of the teacher's outputs, by name in the objective's state."""
    return {
        ours: tensors[name].reshape(-1)
        for ours, names in _CENTRES.items()
        for name in names
        if name in tensors
    }


def _old_name(name: str) -> str:
    """Converts tensor names of PyTorch's new weight normalization to the old names."""
    name = name.replace(".parametrizations.weight.original0", ".weight_g")
    return name.replace(".parametrizations.weight.original1", ".weight_v")


def _head(tensors: Arrays, start: str, last: str) -> Arrays:
    """Returns the parameters of one head, by vit_jax's path within the head.

    Raises:
      UserError: the head does not consist of an MLP of three layers with biases and of prototypes
        without biases.
    """
    taken = {f"{start}.mlp.{index}.{part}" for index in (0, 2, 4) for part in ("weight", "bias")}
    plain, apart = f"{start}.{last}.weight", [f"{start}.{last}.weight_{part}" for part in "gv"]
    taken |= set(apart if apart[0] in tensors else [plain])
    there = {name for name in tensors if name.startswith((f"{start}.mlp.", f"{start}.{last}."))}
    if there != taken:
        raise UserError(
            f"{start} is not an MLP of three layers with prototypes behind it "
            f"({', '.join(sorted(there ^ taken)[:3])})"
        )
    head = {}
    for number, index in enumerate((0, 2, 4)):
        head[f"layers/{number}/kernel"] = tensors[f"{start}.mlp.{index}.weight"].T
        head[f"layers/{number}/bias"] = tensors[f"{start}.mlp.{index}.bias"]
    if apart[0] in tensors:
        head["prototypes"], head["gains"] = tensors[apart[1]].T, tensors[apart[0]].reshape(-1)
    else:
        head["prototypes"] = tensors[plain].T
    return head
