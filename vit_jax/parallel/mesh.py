"""One named mesh over every device: batches are split over `data` and `fsdp`, parameters by
`sharding.py`.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")  # The axes over which the images of a batch are divided.


def mesh_shape(sizes: Mapping[str, int | None], devices: int) -> tuple[int, ...]:
    """Sizes of the axes for so many devices; an axis of size None takes all the rest.

    Raises:
      UserError: the sizes do not make up the devices.
    """
    given = {axis: sizes[axis] for axis in AXES}
    rest = math.prod(size for size in given.values() if size is not None)
    shape = tuple(devices // rest if size is None else size for size in given.values())
    if math.prod(shape) != devices or list(given.values()).count(None) > 1:
        words = " x ".join(
            f"{axis} {'?' if size is None else size}" for axis, size in given.items()
        )
        raise UserError(
            f"the mesh {words} does not make up {devices} device(s): the sizes' product must "
            "(mesh.data, mesh.fsdp, mesh.tensor; None for one of them takes the rest)"
        )
    return shape


def make_mesh(sizes: Mapping[str, int | None], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """All devices of all processes, or those given, on the axes `data`, `fsdp` and `tensor`.

    Neighbours on `tensor`, then on `fsdp`, are neighbours in the machine; where it has several
    slices,
    `data` goes across them.

    Raises:
      UserError: as `mesh_shape` does, or `data` does not divide by the slices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = mesh_shape(sizes, len(devices))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    split_axes = "lite" in devices[0].device_kind or "v5e" in devices[0].device_kind
    if slices == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split_axes)
    elif shape[0] % slices == 0:
        grid = mesh_utils.create_hybrid_device_mesh(
            [shape[0] // slices, *shape[1:]],
            [slices, 1, 1],
            devices,
            allow_split_physical_axes=split_axes,
        )
    else:
        raise UserError(
            f"mesh.data = {shape[0]} does not divide by the {slices} slices, which it goes across"
        )
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_batch(mesh: Mesh) -> NamedSharding:
    """The first axis divided over the devices that do not share images."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def batch_parts(mesh: Mesh | AbstractMesh) -> int:
    """Number of parts into which a batch is divided."""
    return math.prod(mesh.shape[axis] for axis in BATCH)


def whole_batch(mesh: Mesh, images: int) -> int:
    """The next number of images that divides over the mesh."""
    parts = batch_parts(mesh)
    return -(-images // parts) * parts


def check_batch(mesh: Mesh | AbstractMesh, batch_size: int, micro_batches: int = 1) -> None:
    """Raises UserError when a global batch (in micro-batches) does not divide over the mesh."""
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
    """The rows of a global batch that this process has to bring, in order, int `[rows]`."""
    places = split_batch(mesh).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[place] for place in places]))


def to_devices(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Global arrays from this process's rows of each, as `local_rows` numbers them."""
    sharding = split_batch(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, array)
        for name, array in batch.items()
    }


def place(array: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
    """A global array from one that every process has whole."""
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def everywhere(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """A copy on every device of an array that every process has."""
    return place(array, replicated(mesh))


def over_devices(
    array: np.ndarray, mesh: Mesh, rows: int | None = None, fill: float = 0
) -> jax.Array:
    """An array that every process has, its rows divided over the devices as a batch's are.

    Args:
      rows: with rows of `fill` up to so many; by default the next number that divides over the
        mesh.
    """
    padded = np.full((rows or whole_batch(mesh, len(array)), *array.shape[1:]), fill, array.dtype)
    padded[: len(array)] = array
    return place(padded, split_batch(mesh))
