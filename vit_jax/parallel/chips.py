"""Accelerators: their speed, their memory, and the slices they come in."""

import os
import re
from dataclasses import dataclass

import jax

from vit_jax.errors import UserError
from vit_jax.parallel.process_settings import host_memory

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator; all figures are for one JAX device.

    TPU v2 and v3 show each of a chip's two cores as a device.
    """

    name: str
    kind: str  # The beginning of JAX's `device_kind`, or all of it.
    peak_flops: float  # Dense bfloat16, FLOP/s.
    memory_bytes: (
        float  # All that a program can have: on a TPU what its compiler names as available.
    )
    memory_bandwidth: float  # Bytes/s.
    link_bandwidth: (
        float  # Bytes/s out to the others; between GPUs within a machine, by NVLink or PCI Express.
    )
    clock: float | None = (
        None  # Hz of a TPU's core, whose cycles are the unit of its compiler's estimates.
    )
    devices_per_chip: int = 1
    topologies: tuple[str, ...] = ()  # Slices of TPUs, in chips.
    scoped_vmem_kib: int | None = (
        None  # KiB of a core's memory for one operation; None: the default.
    )
    whole_kind: bool = (
        False  # `kind` is all of it: what begins so is another GPU, as an RTX 4090 Laptop is.
    )


# Sources: Google Cloud's TPU pages and "TPU v4" (Jouppi et al., 2023), NVIDIA's data sheets. The
# clock is the peak over the products that a core's matrix units make in a cycle.
_SQUARE = "2x2", "4x4", "4x8", "8x8", "8x16", "16x16"
_CUBE = (
    "2x2x1",
    "2x2x2",
    "2x2x4",
    "2x4x4",
    "4x4x4",
    "4x4x8",
    "4x8x8",
    "8x8x8",
    "8x8x16",
    "8x16x16",
    "16x16x16",
)
CHIPS = (
    Chip("v2", "TPU v2", 22.5e12, 7.48 * GIB, 350e9, 124e9, 0.7e9, 2, _SQUARE),
    Chip(
        "v3", "TPU v3", 61.5e12, 15.48 * GIB, 450e9, 140e9, 0.94e9, 2, (*_SQUARE, "16x32", "32x32")
    ),
    Chip("v4", "TPU v4", 275e12, 30.75 * GIB, 1228e9, 300e9, 1.05e9, 1, _CUBE),
    Chip(
        "v5e",
        "TPU v5 lite",
        197e12,
        15.75 * GIB,
        819e9,
        200e9,
        1.5e9,
        1,
        ("1x1", "2x4", *_SQUARE),
        32768,
    ),
    Chip("v5p", "TPU v5", 459e12, 95.73 * GIB, 2765e9, 600e9, 1.75e9, 1, _CUBE),
    Chip(
        "v6e",
        "TPU v6 lite",
        918e12,
        31.24 * GIB,
        1640e9,
        448e9,
        1.75e9,
        1,
        ("1x1", "2x4", *_SQUARE),
    ),
    Chip("a100", "NVIDIA A100", 312e12, 80e9, 2039e9, 300e9),
    Chip("h100", "NVIDIA H100", 989e12, 80e9, 3350e9, 450e9),
    Chip("h200", "NVIDIA H200", 989e12, 141e9, 4800e9, 450e9),
    # GeForce: the tables of NVIDIA's papers on the architectures (GA102, Ada, RTX Blackwell):
    # bfloat16 with sums in float32, which take these twice as long as float16. The others: data
    # sheets, where that for sparse matrices (L4: 242) is twice that for dense ones; A10G's is
    # Amazon's.
    Chip("rtx3090", "NVIDIA GeForce RTX 3090", 71e12, 24e9, 936e9, 32e9, whole_kind=True),
    Chip("rtx4090", "NVIDIA GeForce RTX 4090", 165.2e12, 24e9, 1008e9, 32e9, whole_kind=True),
    Chip("rtx5090", "NVIDIA GeForce RTX 5090", 209.5e12, 32e9, 1792e9, 64e9, whole_kind=True),
    Chip("l4", "NVIDIA L4", 121e12, 24e9, 300e9, 32e9, whole_kind=True),
    Chip("a10g", "NVIDIA A10G", 70e12, 24e9, 600e9, 32e9, whole_kind=True),
    Chip("l40s", "NVIDIA L40S", 362e12, 48e9, 864e9, 32e9, whole_kind=True),
)


def find_chip(name: str) -> Chip:
    """The chip of this name.

    Raises:
      UserError: there is none.
    """
    plain = _plain(name)
    for chip in CHIPS:
        if plain in (chip.name, _plain(chip.kind)):
            return chip
    names = ", ".join([*(chip.name for chip in CHIPS), "cpu"])
    raise UserError(f"unknown chip {name!r} (--chip); there are: {names}")


def _plain(name: str) -> str:
    """A chip's name as `CHIPS` has it: `RTX 4090`, `rtx-4090` and `GeForce RTX 4090` are
    `rtx4090`.
    """
    return re.sub("nvidia|geforce|tpu|[^a-z0-9]", "", name.lower())


def peak_flops(device_kind: str) -> float | None:
    """FLOP/s of one device of this kind, or None where it is not known: MFU is never guessed."""
    chip = _chip_of(device_kind)
    return chip and chip.peak_flops


def memory_of(device: jax.Device) -> tuple[float | None, float]:
    """Bytes that programs can have on a device, and those of them that are free; None where it is
    not known.

    A CPU's are the machine's, or what this process may have of it, shared by all devices that it
    stands for.
    """
    if device.platform == "cpu":
        return tuple(size / jax.local_device_count("cpu") for size in host_memory())
    stats = device.memory_stats() or {}
    chip = _chip_of(device.device_kind)
    limit = stats.get("bytes_limit") or (chip and chip.memory_bytes)
    return limit, (limit or 0) - stats.get("bytes_in_use", 0)


def compiler_options(device_kind: str) -> dict[str, str]:
    """XLA's options for programs that devices of this kind run.

    With more of a TPU core's own memory, products and what surrounds them are cut into larger
    pieces, and a step takes less time (docs/measurements.md). A limit that LIBTPU_INIT_ARGS sets is
    left as it is.
    """
    chip, option = _chip_of(device_kind), "xla_tpu_scoped_vmem_limit_kib"
    if not (chip and chip.scoped_vmem_kib) or option in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return {}
    return {option: str(chip.scoped_vmem_kib)}


def _chip_of(device_kind: str) -> Chip | None:
    matches = [
        chip
        for chip in CHIPS
        if (device_kind == chip.kind if chip.whole_kind else device_kind.startswith(chip.kind))
    ]
    return max(matches, key=lambda chip: len(chip.kind), default=None)
