"""Settings of this process that training needs."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Has glibc keep large freed blocks for the next step instead of returning them to the system.

    For programs on the CPU: a step frees and takes the same large arrays again, and new pages cost
    it more than half of its time (quickstart, two cores: 49 ms a step without, 29 ms with).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def share_interpreter() -> None:
    """Lets the thread that feeds the devices wait 0.2 ms at most for threads that decode images."""
    sys.setswitchinterval(2e-4)
