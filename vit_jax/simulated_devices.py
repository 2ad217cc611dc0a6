"""Threads for the devices that XLA simulates on the cores of a CPU."""

import os
import re

THREADS = 4  # Threads per device.


def give_threads_to_simulated_devices() -> None:
    """Sets `NPROC`, unless it is set, if `XLA_FLAGS` simulates several devices on a CPU.

    In a program on all devices, each device occupies a thread that waits for the others. XLA has as
    many threads as cores or devices. If another task occupies one of them, the program deadlocks,
    and XLA ends the process after 40 seconds. This happened in 9 of 33 short runs on 8 devices with
    two busy cores, and in none of 24 with four threads per device.
    """
    asked = re.search(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    if asked and int(asked[1]) > 1:
        os.environ.setdefault("NPROC", str(max(THREADS * int(asked[1]), os.cpu_count() or 1)))
