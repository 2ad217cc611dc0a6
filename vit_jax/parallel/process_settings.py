"""Settings of this process that training needs, and the memory that it can have."""

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
ACCELERATORS = "nvidia[0-9]*", "kfd", "accel[0-9]*", "vfio/[0-9]*"  # Their files in /dev.


def keep_freed_memory() -> None:
    """Makes glibc keep large freed blocks for the next step instead of returning them to the
    system.

    This matters where JAX computes on the CPU, and must be called before JAX starts. A step frees
    and takes the same large arrays again, and new pages cost it up to half of its time
    (docs/measurements.md). All
    threads share one heap for it: a heap of a thread's own has no room for blocks above 64 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    accelerated = any(path for pattern in ACCELERATORS for path in Path("/dev").glob(pattern))
    if (jax.config.jax_platforms or ("" if accelerated else "cpu")) == "cpu":
        mallopt(
            M_ARENA_MAX, 1
        )  # Threads take the heap they find first; JAX's start in the next line.
    if jax.default_backend() == "cpu":
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def host_memory() -> tuple[int, int]:
    """Bytes that this process can have at most, and those that are free now.

    The machine's memory and swap, or less where a container (cgroup) or `ulimit -v` says so.
    """
    limits, free = [resource.getrlimit(resource.RLIMIT_AS)[0]], []
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
        limits.append(sizes["MemTotal"] + sizes["SwapTotal"])
        free.append(sizes["MemAvailable"])
    for file in _memory_limits():
        with contextlib.suppress(OSError, ValueError):  # `max`: there is none.
            limits.append(int(file.read_text()))
    if not free:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = min(size for size in limits if size != resource.RLIM_INFINITY)
    return limit, min(limit, *free) if free else limit


def _memory_limits() -> Iterator[Path]:
    """Yields files that may hold a memory limit on this process: those of its cgroup and of all
    above it.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, place = line.split(":", 2)
            if kinds in ("", "memory"):
                root = Path("/sys/fs/cgroup", kinds)
                group = root / place.strip("/")
                for folder in (group, *group.parents):
                    yield folder / ("memory.limit_in_bytes" if kinds else "memory.max")
                    if folder == root:
                        break


def share_interpreter() -> None:
    """Lets the thread that feeds the devices wait 0.2 ms at most for threads that decode images."""
    sys.setswitchinterval(2e-4)
