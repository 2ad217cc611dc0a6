"""Threads for the devices that XLA simulates on the cores of a CPU."""

import os
import re

THREADS = 4  # For each device.


def give_threads_to_simulated_devices() -> None:
    """Sets `NPROC`, unless it is set, where `XLA_FLAGS` makes several devices of a CPU.

    Each of them takes a thread in a program that they run together, and waits there for the others.
    XLA has as many threads as there are cores or devices. Where another task holds one of them the
    program stops for
    good, and XLA ends the process after 40 seconds: so did 9 of 33 short runs of 8 devices on two
    busy cores. With four threads for each device none of 24 did.
    """
    asked = re.search(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    if asked and int(asked[1]) > 1:
        os.environ.setdefault("NPROC", str(max(THREADS * int(asked[1]), os.cpu_count() or 1)))
