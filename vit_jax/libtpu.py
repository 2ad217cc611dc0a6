"""Sets up Google's libtpu on a machine without TPU, where it is the compiler of `plan`."""

import importlib.util
import os
from pathlib import Path

# Without these the library looks for a TPU and for Google's cloud around it, complains at length
# that there is none, and lets one process of a machine use it at a time.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
DEVICES = "accel[0-9]*", "vfio/[0-9]*"  # A TPU's files in /dev.


def expect_no_tpu_where_none_is() -> None:
    """Sets `ENVIRONMENT`, but for what is set already, where libtpu is installed and there is no
    TPU.

    JAX, which tries each library of devices that it finds, then finds none here without a word. It
    looks when it is asked for its devices first.
    """
    if importlib.util.find_spec("libtpu") is None:
        return
    if not any(path for pattern in DEVICES for path in Path("/dev").glob(pattern)):
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
