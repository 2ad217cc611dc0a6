"""Huge pages (2 MB) for the memory of training on a CPU.

A training step allocates and frees gigabytes. With pages of 4 kB, the system maps and clears
hundreds of thousands of pages in each training step of ConvNeXt-T (docs/measurements.md). glibc
requests huge pages only if an environment variable is set before the process starts. This module
therefore sets the variable and restarts the process.
"""

import os
import sys
from pathlib import Path

_VARIABLE, _NAME = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_SETTING = f"{_NAME}=1"
_RESTARTED = "VIT_JAX_RESTARTED"  # Set only while the process restarts.
_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ACCELERATORS = "nvidia[0-9]*", "kfd", "accel[0-9]*", "vfio/[0-9]*"  # Device files in /dev.


def has_accelerator() -> bool:
    """Returns True if the machine has a GPU or a TPU."""
    return any(path for pattern in _ACCELERATORS for path in Path("/dev").glob(pattern))


def restart_with_huge_pages() -> None:
    """Restarts this process with the same arguments, such that `malloc` requests huge pages.

    The process is restarted only once. It is not restarted in these cases:

    - JAX will compute on an accelerator.
    - The system gives huge pages to all programs, or to none.
    - glibc is older than 2.35.
    - `GLIBC_TUNABLES` already sets the option.
    - The process was forked, so that its arguments are unknown.

    Child processes do not inherit the setting. Call this function before other imports, because the
    restarted process repeats all imports.
    """
    tunables = os.environ.get(_VARIABLE, "")
    if os.environ.pop(_RESTARTED, None):
        os.environ[_VARIABLE] = tunables.removesuffix(_SETTING).removesuffix(":")
        return
    platforms = os.environ.get("JAX_PLATFORMS") or ("" if has_accelerator() else "cpu")
    forked = sys.orig_argv[-1:] != sys.argv[-1:]
    if platforms == "cpu" and not forked and _NAME not in tunables and _on_request():
        os.environ[_VARIABLE] = f"{tunables}:{_SETTING}".removeprefix(":")
        os.environ[_RESTARTED] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _on_request() -> bool:
    """Returns True if the system gives huge pages only on request, and glibc can request them."""
    try:
        library, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        major, minor = map(int, version.split(".")[:2])
        return library == "glibc" and (major, minor) >= (2, 35) and "[madvise]" in _MODE.read_text()
    except (OSError, ValueError):
        return False  # Not Linux with glibc.
