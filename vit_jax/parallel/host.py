"""Settings of this process that training needs."""

import ctypes
import sys
from pathlib import Path

import jax

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
ACCELERATORS = "nvidia[0-9]*", "kfd", "accel[0-9]*", "vfio/[0-9]*"  # Their files in /dev.


def keep_freed_memory() -> None:
    """Has glibc keep large freed blocks for the next step instead of returning them to the system.

    Where JAX computes on the CPU; to be called before JAX starts. A step frees and takes the same large
    arrays again, and new pages cost it up to half of its time (docs/performance.md). All threads share one
    heap for it: a heap of a thread's own has no room for blocks above 64 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    found = any(path for pattern in ACCELERATORS for path in Path("/dev").glob(pattern))
    if (jax.config.jax_platforms or ("" if found else "cpu")) == "cpu":
        mallopt(M_ARENA_MAX, 1)  # Threads take the heap they find first; JAX's start in the next line.
    if jax.default_backend() == "cpu":
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def share_interpreter() -> None:
    """Lets the thread that feeds the devices wait 0.2 ms at most for threads that decode images."""
    sys.setswitchinterval(2e-4)
