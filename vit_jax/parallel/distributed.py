"""Start-up of a run over several processes (one a host)."""

import jax

from vit_jax.errors import UserError

CONNECT_SECONDS = 120


def start(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Joins this process to the others.

    Args:
      coordinator: `host:port` of process 0; `auto` asks the Cloud TPU, GKE or SLURM environment
        for all three values; None is a run of one process.
      processes, process: how many there are, and which this one is.

    Raises:
      UserError: the coordinator cannot be reached in time, or the environment does not tell.
    """
    if coordinator is None:
        return
    if coordinator == "auto":
        coordinator = None
    elif processes is None or process is None:
        raise UserError("--coordinator=host:port needs --processes and --process too (or --coordinator=auto)")
    try:
        jax.distributed.initialize(coordinator, processes, process, initialization_timeout=CONNECT_SECONDS)
    except (RuntimeError, ValueError) as error:
        where = coordinator or "the address that the environment gives"
        raise UserError(
            f"no connection to the coordinator at {where} within {CONNECT_SECONDS} s: {error}".splitlines()[0]
        ) from error
