"""Tests of simulated devices, which XLA creates on one CPU."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("flags", "given", "threads"),
    [
        ("--xla_force_host_platform_device_count=64", {}, "256"),
        ("--xla_force_host_platform_device_count=64", {"NPROC": "70"}, "70"),
        ("--xla_force_host_platform_device_count=1", {}, "None"),
        ("", {}, "None"),
    ],
)
def test_number_of_threads_grows_with_simulated_devices_unless_set_by_the_user(
    flags, given, threads
):
    others = {
        name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")
    }
    found = subprocess.run(
        [sys.executable, "-c", "import os, vit_jax; print(os.environ.get('NPROC'))"],
        env=others | {"XLA_FLAGS": flags} | given,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == threads
