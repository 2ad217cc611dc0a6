"""Where arrays live: one named mesh over every device, batches split, parameters copied."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax.errors import UserError


def make_mesh() -> Mesh:
    """All devices of all processes on one axis, `data`: the paper's data parallelism."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_batch(mesh: Mesh) -> NamedSharding:
    """The first axis divided over the devices."""
    return NamedSharding(mesh, PartitionSpec("data"))


def check_batch(batch_size: int, micro_batches: int = 1) -> None:
    """Raises UserError when a global batch (in micro-batches) does not divide by the devices."""
    unit = jax.device_count() * micro_batches
    if batch_size <= 0 or batch_size % unit:
        near = max(unit, round(batch_size / unit) * unit)
        raise UserError(
            f"batch size {batch_size} does not divide by {jax.device_count()} device(s) x "
            f"{micro_batches} micro-batch(es); use a multiple of {unit}, such as {near}"
        )


def to_devices(batch: dict[str, np.ndarray], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Global arrays from this process's part of each, `[local batch, ...]`."""
    return {name: jax.make_array_from_process_local_data(sharding, array) for name, array in batch.items()}
