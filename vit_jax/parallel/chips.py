"""Peak speed of known accelerators, for the share of it that a run uses (MFU)."""

# Dense bfloat16 FLOP/s per JAX device. TPU v2 and v3 show each of a chip's two cores as a device.
# Sources: Google Cloud's TPU pages and NVIDIA's data sheets.
PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(device_kind: str) -> float | None:
    """FLOP/s of one device of this kind, or None where it is not known: MFU is never guessed."""
    matches = [kind for kind in PEAK_FLOPS if device_kind.startswith(kind)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None
