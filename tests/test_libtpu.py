"""libtpu, the TPU compiler, does not disturb other programs on a machine without TPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason='needs pip install -e ".[plan]"'
    ),
    pytest.mark.skipif(
        any(Path("/dev").glob("accel*")) or any(Path("/dev").glob("vfio/*")),
        reason="there is a TPU",
    ),
]


def start(*arguments, **environment):
    """Runs Python without environment variables about devices.

    libtpu's lock file is ignored: while another process has the lock, libtpu is not loaded and
    prints nothing.
    """
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_PLAT", "TPU_"))
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env=others | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"} | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("imports", ["import vit_jax, jax", "import jax, vit_jax"])
def test_jax_finds_its_devices_without_messages_of_libtpu(imports):
    process = start("-c", f"{imports}; print(jax.default_backend())")
    assert process.returncode == 0
    assert process.stderr == ""


def test_environment_variables_of_the_user_are_kept():
    code = (
        "import os, vit_jax; print(os.environ['TPU_ACCELERATOR_TYPE'], "
        "os.environ['TPU_SKIP_MDS_QUERY'])"
    )
    process = start("-c", code, TPU_ACCELERATOR_TYPE="v6e-8")
    assert process.stdout.split() == ["v6e-8", "1"]
