"""Start of a run with several processes: connects the processes, then starts JAX in each."""

import contextlib
import ctypes
import os
import signal
import socket

import jax
from jax._src.clusters import ClusterEnv  # JAX's detection of Cloud TPU, GKE and SLURM.

from vit_jax.errors import UserError
from vit_jax.parallel.peers import Peers, join

SHUTDOWN_SECONDS = 30


@contextlib.contextmanager
def start(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    connect_seconds: float = 120.0,
):
    """Connects the processes of a run, starts JAX's collectives, and yields the run's `Peers`.

    Args:
      coordinator: `host:port` of process 0. `auto`: the address, `processes` and `process` are read
        from the Cloud TPU, GKE or SLURM environment. None: the run has one process.
      connect_seconds: timeout for connecting to the other processes.

    Raises:
      UserError: other processes cannot be reached in time, or the environment does not contain the
        values for `auto`.
    """
    if coordinator is None:
        if processes is not None or process is not None:
            raise UserError("--processes and --process need --coordinator=HOST:PORT of process 0")
        yield Peers()
        return
    local_devices = None
    if coordinator == "auto":
        coordinator, processes, process, local_devices = detect(connect_seconds)
    elif processes is None or process is None:
        raise UserError(
            "--coordinator=HOST:PORT needs --processes and --process too (or --coordinator=auto)"
        )
    with join(coordinator, processes, process, connect_seconds) as peers:
        if peers.count > 1:
            _hold_aborts()
            # JAX listens on a different port, because `peers` uses the port of `coordinator`.
            port = peers.share("port for JAX", _free_port())
            address = f"{coordinator.rpartition(':')[0]}:{port}"
            try:
                jax.distributed.initialize(
                    address,
                    processes,
                    process,
                    local_device_ids=local_devices,
                    cluster_detection_method="deactivate",
                    initialization_timeout=int(connect_seconds),
                    shutdown_timeout_seconds=SHUTDOWN_SECONDS,
                )
            except (RuntimeError, ValueError) as error:
                raise UserError(
                    f"JAX cannot connect to {address}, a free port of process 0: "
                    f"{str(error).splitlines()[0]}; open all TCP ports between the hosts"
                ) from error
        yield peers


def detect(seconds: float) -> tuple[str, int, int, list[int] | None]:
    """Detects the processes of a run from the environment (Cloud TPU, GKE or SLURM).

    Returns:
      Address of process 0, number of processes, index of this process, and indices of this
      process's devices. The last element is None if the process has all devices of the host.

    Raises:
      UserError: there is no Cloud TPU, GKE or SLURM environment, or it does not respond.
    """
    try:
        unset = (None,) * 5
        detected = ClusterEnv.auto_detect_unset_distributed_params(*unset, int(seconds))
    except Exception as error:  # Metadata servers and the Kubernetes client have many exceptions.
        raise UserError(f"--coordinator=auto: {error}") from error
    if None in detected[:3]:
        raise UserError(
            "--coordinator=auto finds no Cloud TPU, GKE or SLURM here; "
            "give --coordinator=HOST:PORT --processes=N --process=I"
        )
    address, processes, process, local_devices = detected
    # On SLURM, JAX assigns one GPU to each task. A user can choose other devices with the
    # environment variable JAX_LOCAL_DEVICE_IDS. `jax.distributed.initialize` reads this variable
    # only if its argument `local_device_ids` is None.
    chosen = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    return address, processes, process, None if chosen else local_devices


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _hold_aborts() -> None:
    """Makes abort signals (SIGABRT) take effect 6 s later, so that a dead leader can be reported.

    When JAX's client loses the connection to process 0 (the leader), JAX aborts with a stack trace
    that does not name the dead process. During the 6 s, the receiving thread of `peers.py` can
    print an error that names this process.

    The signal handler is the C function `sleep`. A signal handler is called with the number of the
    signal, which is 6 for SIGABRT. Therefore `sleep` waits for 6 s.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
