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

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # Constants of glibc's malloc.h.


def keep_freed_memory() -> None:
    """Makes glibc keep large freed blocks of memory for the next step.

    The function must be called before JAX starts. It only matters if JAX computes on the CPU. Each
    step frees and allocates the same large arrays. By default, glibc returns freed arrays to the
    system. New memory pages then take up to half of a step's time (docs/measurements.md).

    With this setting, all threads share one heap. The reason is that a thread's own heap cannot
    contain blocks above 64 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    if (jax.config.jax_platforms or ("" if has_accelerator() else "cpu")) == "cpu":
        # A thread keeps the first heap that glibc assigns to it. Therefore JAX's threads must start
        # after this call.
        mallopt(M_ARENA_MAX, 1)
    if jax.default_backend() == "cpu":
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def host_memory() -> tuple[int, int]:
    """Returns this process's memory limit and its free memory, in bytes.

    The limit is the lowest of three limits: the machine's memory and swap, the limit of a container
    (cgroup), and `ulimit -v`.
    """
    limits, free = [resource.getrlimit(resource.RLIMIT_AS)[0]], []
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
        limits.append(sizes["MemTotal"] + sizes["SwapTotal"])
        free.append(sizes["MemAvailable"])
    for file in _memory_limits():
        with contextlib.suppress(OSError, ValueError):  # A file with `max` means no limit.
            limits.append(int(file.read_text()))
    if not free:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = min(size for size in limits if size != resource.RLIM_INFINITY)
    return limit, min(limit, *free) if free else limit


def _memory_limits() -> Iterator[Path]:
    """Yields the files with the memory limits of this process's cgroup and of its parents."""
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
    """Lets Python switch threads after 0.2 ms, so decoding threads do not delay the device feed."""
    sys.setswitchinterval(2e-4)
