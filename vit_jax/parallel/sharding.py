"""Shardings of a model's arrays on the mesh: parameters, optimizer state, activations.

The model's family names the axes of its parameters (`models/family.py`). If the mesh axis `tensor`
is larger than 1, it splits the heads of attention layers and the hidden units of MLPs, as in
Megatron-LM (Shoeybi et al., 2019), and the output channels of convolutions. The mesh axis `fsdp`
does not depend on the names of axes. It splits the largest axis of each array that is not small,
preferably an axis that `tensor` does not split.
"""

import math
import os

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.errors import UserError
from vit_jax.models import logical_axes
from vit_jax.models.layers import ByShard
from vit_jax.parallel.chips import supports_kernels
from vit_jax.parallel.mesh import BATCH, replicated

# Environment variable. With the value 1, training on TPUs uses kernels that have not run on a TPU.
KERNELS = "VIT_JAX_KERNELS"

# Names of the parameters' axes that the mesh axis `tensor` splits. A classification head is split
# along its inputs ("features"), because the number of classes is often odd.
TENSOR = ("heads", "mlp_dim", "outputs", "features")

# For each activation: {axis of the activation: mesh axis or axes that split it}. Negative axes are
# counted from the end.
ACTIVATIONS = {
    "tokens": {0: BATCH},
    "heads": {0: BATCH, -2: "tensor"},  # batch ... tokens heads head_dim
    "hidden": {0: BATCH, -1: "tensor"},  # batch ... tokens hidden
    "features": {0: BATCH},  # batch height width channels
    "hidden_features": {0: BATCH, -1: "tensor"},  # batch height width hidden
}

# Smaller arrays are replicated: gathering the shards of such an array would take longer than
# reading the whole array from memory.
SMALL = 2**14
LARGE = 2**20  # Arrays with at least this number of elements must have an axis that can be split.


def parameter_sharding(mesh: Mesh, path: str, shape: tuple[int, ...]) -> NamedSharding:
    """Returns the sharding of the parameter with this path.

    Raises:
      UserError: `tensor` splits an axis whose size is not divisible by `mesh.tensor`, or the array
        is large and none of its axes is divisible by `mesh.fsdp`.
    """
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    axes = _tensor_axes(tensor, path, shape)
    if fsdp > 1 and math.prod(shape) >= SMALL:
        sizes = [size // tensor if names else size for size, names in zip(shape, axes, strict=True)]
        if divisible := [axis for axis, size in enumerate(sizes) if size % fsdp == 0]:
            # `fsdp` splits the largest axis, preferably an axis that `tensor` does not split.
            best = max(divisible, key=lambda axis: (not axes[axis], sizes[axis]))
            axes[best] += ("fsdp",)
        elif math.prod(shape) >= LARGE:
            near = max(math.gcd(size, fsdp) for size in sizes)
            raise UserError(
                f"mesh.fsdp = {fsdp} divides no axis of the parameter {path} {list(shape)}; use "
                f"a smaller one, such as mesh.fsdp={near}, and a larger mesh.data"
            )
    return NamedSharding(mesh, PartitionSpec(*(names or None for names in axes)))


def _tensor_axes(tensor: int, path: str, shape: tuple[int, ...]) -> list[tuple[str, ...]]:
    """Returns the mesh axes, `("tensor",)` or (), that split each axis of a parameter.

    Raises:
      UserError: `tensor` splits an axis whose size is not divisible by `tensor`.
    """
    axes: list[tuple[str, ...]] = [()] * len(shape)
    if tensor == 1:
        return axes
    if logical := logical_axes(path, len(shape)):
        axes = [("tensor",) if name in TENSOR else () for name in logical.names]
    for axis, names in enumerate(axes):
        if names and shape[axis] % tensor:
            raise UserError(
                f"mesh.tensor = {tensor} does not divide axis {axis} of the parameter {path} "
                f"{list(shape)}; use a divisor of {shape[axis]}, such as "
                f"{math.gcd(shape[axis], tensor)}"
            )
    return axes


def parameter_shardings(mesh: Mesh, params: dict) -> dict:
    """Returns the sharding of every parameter; `params` contains arrays or shapes."""
    return jax.tree.map_with_path(
        lambda path, x: parameter_sharding(mesh, path_name(path), x.shape), params
    )


def optimizer_shardings(mesh: Mesh, params: dict, optimizer_state) -> dict:
    """Returns the shardings of the optimizer state: moments are sharded like their parameters.

    Step counts, and Adafactor's sums over rows or columns, are small and are replicated.
    """
    shapes = {path_name(path): x.shape for path, x in jax.tree.leaves_with_path(params)}

    def place(path, x):
        names = path_name(path).split("/")
        for start in range(len(names)):
            name = "/".join(names[start:])
            if shapes.get(name) == x.shape:
                return parameter_sharding(mesh, name, x.shape)
        return replicated(mesh)

    return jax.tree.map_with_path(place, optimizer_state)


def place_activation(mesh: Mesh, name: str, x: jax.Array) -> jax.Array:
    """Returns the activation `x`, constrained to the sharding that `ACTIVATIONS` contains for it.

    Args:
      name: name of the activation, a key of `ACTIVATIONS`.
    """
    axes = [None] * x.ndim
    for axis, mesh_axes in ACTIVATIONS[name].items():
        axes[axis] = mesh_axes
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


def path_name(path: tuple) -> str:
    """Converts a JAX key path to a name, such as `blocks/00/mlp/fc1/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_shard(mesh: Mesh, alone: bool = False) -> ByShard | None:
    """Returns the function that calls kernels for each device's part of a batch (`models/layers`).

    The result is None if the environment variable `KERNELS` is not 1, if the devices do not run
    kernels, or if the mesh axis `tensor` splits heads.

    Args:
      alone: True if the caller is inside a `shard_map`, where arrays are a device's part already.
    """
    if os.environ.get(KERNELS) != "1" or mesh.shape["tensor"] > 1:
        return None
    if not supports_kernels(mesh.devices.flat[0].device_kind):
        return None

    def call(function, arrays, shared):
        places = (PartitionSpec(BATCH),) * len(arrays) + (PartitionSpec(),) * len(shared)
        return jax.shard_map(
            function, mesh=mesh, in_specs=places, out_specs=PartitionSpec(BATCH), check_vma=False
        )(*arrays, *shared)

    return (lambda function, arrays, shared: function(*arrays, *shared)) if alone else call
