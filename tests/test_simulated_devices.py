"""Several devices that XLA makes of one CPU."""

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
def test_they_have_threads_enough_unless_the_user_says_how_many(flags, given, threads):
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
