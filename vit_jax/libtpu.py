"""Configures Google's libtpu on a machine without TPU. There, `plan` only uses its compiler."""

import importlib.util
import os
from pathlib import Path

# Environment variables for libtpu. Without them, libtpu searches for a TPU and for Google's cloud,
# logs many warnings, and allows only one process per machine.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
DEVICES = "accel[0-9]*", "vfio/[0-9]*"  # Names of a TPU's files in /dev.


def expect_no_tpu_where_none_is() -> None:
    """Sets the variables `ENVIRONMENT` if libtpu is installed on a machine without TPU.

    Variables that are already set are not changed. When devices are first requested, JAX tries each
    installed device library. With these variables, libtpu finds no TPU and logs no warnings.
    """
    if importlib.util.find_spec("libtpu") is None:
        return
    if not any(path for pattern in DEVICES for path in Path("/dev").glob(pattern)):
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
