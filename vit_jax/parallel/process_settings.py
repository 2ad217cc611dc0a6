"""Process settings that training needs, and the memory available to this process."""

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from vit_jax.huge_pages import has_accelerator

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Makes glibc keep large freed blocks for the next step.

    Call it before JAX starts; it matters only if JAX computes on the CPU. Each step frees and
    allocates the same large arrays. By default glibc returns them to the system, and new pages take
    up to half of a step's time (docs/measurements.md). With this setting all threads share one
    heap, because a thread's own heap has no room for blocks above 64 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    if (jax.config.jax_platforms or ("" if has_accelerator() else "cpu")) == "cpu":
        # A thread keeps its first heap, so this precedes the start of JAX's threads.
        mallopt(M_ARENA_MAX, 1)
    if jax.default_backend() == "cpu":
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def host_memory() -> tuple[int, int]:
    """Returns this process's memory limit and its free memory, in bytes.

    The limit is the machine's memory and swap, or a lower limit of a container (cgroup) or `ulimit
    -v`.
    """
    limits, free = [resource.getrlimit(resource.RLIMIT_AS)[0]], []
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
        limits.append(sizes["MemTotal"] + sizes["SwapTotal"])
        free.append(sizes["MemAvailable"])
    for file in _memory_limits():
        with contextlib.suppress(OSError, ValueError):  # `max`: no limit.
            limits.append(int(file.read_text()))
    if not free:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = min(size for size in limits if size != resource.RLIM_INFINITY)
    return limit, min(limit, *free) if free else limit


def _memory_limits() -> Iterator[Path]:
    """Yields the files that may limit this process's memory: of its cgroup and the parents."""
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
    """Lets the thread that feeds the devices preempt decoding threads after 0.2 ms."""
    sys.setswitchinterval(2e-4)
