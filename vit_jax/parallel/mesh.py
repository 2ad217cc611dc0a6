"""The mesh of all devices, with the axes `data`, `fsdp` and `tensor`, and placement of batches.

Batches are split over `data` and `fsdp`. `sharding.py` determines the sharding of parameters.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax.errors import UserError
from vit_jax.options.run import MeshOptions

AXES = ("data", "fsdp", "tensor")
ALL_DATA = MeshOptions()  # All devices are on the axis `data`.
BATCH = ("data", "fsdp")  # The axes over which a batch is split.


def mesh_shape(options: MeshOptions, devices: int) -> tuple[int, ...]:
    """Returns the sizes of the mesh axes `data`, `fsdp` and `tensor`.

    One of the three options may be None: the size of this axis is then computed from the number of
    devices.

    Raises:
      UserError: the product of the sizes is not the number of devices.
    """
    sizes = {axis: getattr(options, axis) for axis in AXES}
    rest = math.prod(size for size in sizes.values() if size is not None)
    shape = tuple(devices // rest if size is None else size for size in sizes.values())
    if math.prod(shape) != devices or list(sizes.values()).count(None) > 1:
        words = " x ".join(
            f"{axis} {'?' if size is None else size}" for axis, size in sizes.items()
        )
        raise UserError(
            f"the mesh {words} does not make up {devices} device(s): the sizes' product must "
            "(mesh.data, mesh.fsdp, mesh.tensor; None for one of them takes the rest)"
        )
    return shape


def make_mesh(options: MeshOptions = ALL_DATA, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh with the axes `data`, `fsdp` and `tensor`.

    Devices along `tensor` are physical neighbours, and so are, if possible, devices along `fsdp`.
    Several TPU slices are joined along `data`.

    Args:
      options: sizes of the axes.
      devices: devices of the mesh; None: all devices of all processes.

    Raises:
      UserError: the product of the sizes is not the number of devices, or `data` is not divisible
        by the number of slices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = mesh_shape(options, len(devices))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    split_axes = "lite" in devices[0].device_kind or "v5e" in devices[0].device_kind
    if slices == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split_axes)
    elif shape[0] % slices == 0:
        in_slice, of_slices = [shape[0] // slices, *shape[1:]], [slices, 1, 1]
        grid = mesh_utils.create_hybrid_device_mesh(
            in_slice, of_slices, devices, allow_split_physical_axes=split_axes
        )
    else:
        raise UserError(
            f"mesh.data = {shape[0]} is not a multiple of the {slices} slices, over which "
            "it extends"
        )
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_batch(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: the first axis is split over the mesh axes `BATCH`."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def batch_parts(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of parts into which a batch is split: size of `data` * size of `fsdp`."""
    return math.prod(mesh.shape[axis] for axis in BATCH)


def whole_batch(mesh: Mesh, images: int) -> int:
    """Rounds a number of images up to a multiple of `batch_parts`, so it can be split evenly."""
    parts = batch_parts(mesh)
    return -(-images // parts) * parts


def check_batch(mesh: Mesh | AbstractMesh, batch_size: int, micro_batches: int = 1) -> None:
    """Raises UserError if a global batch cannot be split evenly over the mesh and micro-batches."""
    unit = batch_parts(mesh) * micro_batches
    if batch_size <= 0 or batch_size % unit:
        near = max(unit, round(batch_size / unit) * unit)
        parts = f"{mesh.size} device(s)"
        if mesh.shape["tensor"] > 1:
            parts = f"{batch_parts(mesh)} groups of {mesh.shape['tensor']} devices"
        raise UserError(
            f"batch size {batch_size} does not divide by {parts} x "
            f"{micro_batches} micro-batch(es); use a multiple of {unit}, such as {near}"
        )


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Returns the indices, in a global batch, of the examples that this process reads.

    The result is int `[examples]`.
    """
    places = split_batch(mesh).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[place] for place in places]))


def to_devices(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Copies this process's examples of a batch to its devices, and returns the global arrays.

    Each process passes only the examples whose indices `local_rows` returns in this process.
    """
    make, sharding = jax.make_array_from_process_local_data, split_batch(mesh)
    return {name: make(sharding, array) for name, array in batch.items()}


def place(array: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
    """Copies an array to the devices with a sharding. Every process passes the whole array."""
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def everywhere(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """Copies an array to every device. Every process passes the same array."""
    return place(array, replicated(mesh))


def over_devices(
    array: np.ndarray, mesh: Mesh, rows: int | None = None, fill: float = 0
) -> jax.Array:
    """Pads an array's first axis and splits it over the mesh axes `data` and `fsdp`.

    Every process passes the whole array. The padded length is `rows`, or else the smallest length
    that can be split evenly.
    """
    padded = np.full((rows or whole_batch(mesh, len(array)), *array.shape[1:]), fill, array.dtype)
    padded[: len(array)] = array
    return place(padded, split_batch(mesh))
