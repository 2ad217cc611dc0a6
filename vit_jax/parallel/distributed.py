"""Start-up of a run over several processes (one a host): the peers find each other, then JAX
starts.
"""

import contextlib
import ctypes
import os
import signal
import socket

import jax
from jax._src.clusters import ClusterEnv  # It finds Cloud TPU, GKE, SLURM for JAX.

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
    """The context of a run's `Peers`, with JAX's collectives ready.

    Args:
      coordinator: `host:port` of process 0; `auto` asks the Cloud TPU, GKE or SLURM environment
        for all three values; None is a run of one process.
      processes, process: how many there are, and which one this is.

    Raises:
      UserError: the others cannot be reached in time, or the environment does not tell.
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
            # A port of its own for JAX, for the given one has the peers' connections.
            address = (
                f"{coordinator.rpartition(':')[0]}:{peers.share('port for JAX', _free_port())}"
            )
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
    """Address of process 0, number of processes, which one this is, and its devices, None for all.

    Raises:
      UserError: there is no Cloud TPU, GKE or SLURM around this process, or it does not answer.
    """
    try:
        detected = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(seconds)
        )
    except Exception as error:  # A metadata server's, or the client's of Kubernetes.
        raise UserError(f"--coordinator=auto: {error}") from error
    if None in detected[:3]:
        raise UserError(
            "--coordinator=auto finds no Cloud TPU, GKE or SLURM here; "
            "give --coordinator=HOST:PORT --processes=N --process=I"
        )
    address, processes, process, local_devices = detected
    # On SLURM JAX gives a task one GPU, unless this variable, which it reads later, says otherwise.
    return (
        address,
        processes,
        process,
        None if os.environ.get("JAX_LOCAL_DEVICE_IDS") else local_devices,
    )


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _hold_aborts() -> None:
    """Gives the peers' thread 6 s to name a dead leader.

    JAX's client aborts when it loses its service, with a stack trace and no name. The handler of
    the signal is the C library's `sleep`, and its argument is the signal's number.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
