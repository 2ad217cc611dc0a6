"""Accelerators: peak FLOP/s, memory, bandwidth and TPU slices."""

import re
from dataclasses import dataclass

import jax

from vit_jax.errors import UserError
from vit_jax.parallel.process_settings import host_memory

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator. All values are for one JAX device.

    On TPU v2 and v3, a chip has two cores, and each core is a JAX device.
    """

    name: str
    kind: str  # JAX's `device_kind`, or a prefix of it.
    peak_flops: float  # Peak of bfloat16 products without sparsity, in FLOP/s.
    # Memory available to a program in bytes; for TPUs as reported by the compiler.
    memory_bytes: float
    memory_bandwidth: float  # Bytes/s.
    # Bandwidth of the links to other devices in bytes/s; for GPUs, of the links within a machine
    # (NVLink, PCI Express).
    link_bandwidth: float
    # Clock of a TPU core in Hz. It converts the compiler's cycles to seconds.
    clock: float | None = None
    devices_per_chip: int = 1
    topologies: tuple[str, ...] = ()  # Available TPU slices: chips along each axis, such as `4x4`.
    # True: a device is of this kind only if `kind` equals `device_kind`. False: `kind` may also be
    # a prefix of `device_kind`. True is needed for GPUs such as RTX 4090, whose name is a prefix of
    # another GPU's name, RTX 4090 Laptop.
    whole_kind: bool = False


# The values are from Google Cloud's TPU pages, "TPU v4" (Jouppi et al., 2023), and NVIDIA's data
# sheets. The clock is the peak FLOP/s, divided by the FLOPs of the matrix units in one cycle.
_SQUARE = "2x2", "4x4", "4x8", "8x8", "8x16", "16x16"
_CUBE = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8"),
    *("8x8x8", "8x8x16", "8x16x16", "16x16x16"),
)
_LARGE, _SMALL = (*_SQUARE, "16x32", "32x32"), ("1x1", "2x4", *_SQUARE)
CHIPS = (
    Chip("v2", "TPU v2", 22.5e12, 7.48 * GIB, 350e9, 124e9, 0.7e9, 2, _SQUARE),
    Chip("v3", "TPU v3", 61.5e12, 15.48 * GIB, 450e9, 140e9, 0.94e9, 2, _LARGE),
    Chip("v4", "TPU v4", 275e12, 30.75 * GIB, 1228e9, 300e9, 1.05e9, 1, _CUBE),
    Chip("v5e", "TPU v5 lite", 197e12, 15.75 * GIB, 819e9, 200e9, 1.5e9, 1, _SMALL),
    Chip("v5p", "TPU v5", 459e12, 95.73 * GIB, 2765e9, 600e9, 1.75e9, 1, _CUBE),
    Chip("v6e", "TPU v6 lite", 918e12, 31.24 * GIB, 1640e9, 448e9, 1.75e9, 1, _SMALL),
    Chip("a100", "NVIDIA A100", 312e12, 80e9, 2039e9, 300e9),
    Chip("h100", "NVIDIA H100", 989e12, 80e9, 3350e9, 450e9),
    Chip("h200", "NVIDIA H200", 989e12, 141e9, 4800e9, 450e9),
    # GeForce: tables in NVIDIA's architecture papers (GA102, Ada, RTX Blackwell), for bfloat16 with
    # float32 accumulation. With float16 accumulation the speed would be twice as high. All other
    # GPUs: data sheets, for dense matrices. Some data sheets only contain the peak for sparse
    # matrices, such as 242 TFLOP/s for the L4, which is twice the dense peak. The values of A10G
    # are from Amazon.
    Chip("rtx3090", "NVIDIA GeForce RTX 3090", 71e12, 24e9, 936e9, 32e9, whole_kind=True),
    Chip("rtx4090", "NVIDIA GeForce RTX 4090", 165.2e12, 24e9, 1008e9, 32e9, whole_kind=True),
    Chip("rtx5090", "NVIDIA GeForce RTX 5090", 209.5e12, 32e9, 1792e9, 64e9, whole_kind=True),
    Chip("l4", "NVIDIA L4", 121e12, 24e9, 300e9, 32e9, whole_kind=True),
    Chip("a10g", "NVIDIA A10G", 70e12, 24e9, 600e9, 32e9, whole_kind=True),
    Chip("l40s", "NVIDIA L40S", 362e12, 48e9, 864e9, 32e9, whole_kind=True),
)


def find_chip(name: str) -> Chip:
    """Returns the chip with this name.

    Raises:
      UserError: no known chip has this name.
    """
    plain = _plain(name)
    for chip in CHIPS:
        if plain in (chip.name, _plain(chip.kind)):
            return chip
    names = ", ".join([*(chip.name for chip in CHIPS), "cpu"])
    raise UserError(f"unknown chip {name!r} (--chip); there are: {names}")


def _plain(name: str) -> str:
    """Normalizes a chip's name: `RTX 4090`, `rtx-4090` and `GeForce RTX 4090` are `rtx4090`."""
    return re.sub("nvidia|geforce|tpu|[^a-z0-9]", "", name.lower())


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak FLOP/s of a device; None: unknown."""
    chip = _chip_of(device_kind)
    return chip and chip.peak_flops


def memory_of(device: jax.Device) -> tuple[float | None, float]:
    """Returns a pair for a device: its total memory and its free memory, in bytes.

    The total is None if it is unknown. For CPU devices, the memory of the machine, or this
    process's memory limit, is divided equally among the devices.
    """
    if device.platform == "cpu":
        return tuple(size / jax.local_device_count("cpu") for size in host_memory())
    stats = device.memory_stats() or {}
    chip = _chip_of(device.device_kind)
    limit = stats.get("bytes_limit") or (chip and chip.memory_bytes)
    return limit, (limit or 0) - stats.get("bytes_in_use", 0)


def supports_kernels(device_kind: str) -> bool:
    """Returns True if devices of this kind run our TPU kernels: TPU v4 and later.

    The compiler has no bfloat16 products in kernels for v2 and v3.
    """
    return device_kind.startswith("TPU") and not device_kind.startswith(("TPU v2", "TPU v3"))


def _chip_of(device_kind: str) -> Chip | None:
    matches = [
        chip
        for chip in CHIPS
        if (device_kind == chip.kind if chip.whole_kind else device_kind.startswith(chip.kind))
    ]
    return max(matches, key=lambda chip: len(chip.kind), default=None)
