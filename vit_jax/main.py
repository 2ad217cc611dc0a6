"""Trains a model: python -m vit_jax.main --config=configs/quickstart.py --workdir=DIR.

Flags change values of the config: --config.optimizer.learning_rate=1e-3. The argument `smoke`
(--config=configs/vit_l16_i21k.py:smoke) runs two steps on random images to test the set-up.
"""

import time

STARTED = time.time()

from vit_jax.huge_pages import restart_with_huge_pages  # noqa: E402

if __name__ == "__main__":
    restart_with_huge_pages()

from absl import flags  # noqa: E402

from vit_jax import command  # noqa: E402
from vit_jax.config import check, given_keys, leaves  # noqa: E402
from vit_jax.errors import UserError  # noqa: E402

CONFIG = command.define_config("The job: a file such as configs/quickstart.py.")
WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Where the run is saved: a folder, gs://BUCKET/RUN or s3://BUCKET/RUN; start again with it "
    "to resume.",
)
COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "Several processes: host:port of the first, or auto on Cloud TPU, GKE and SLURM.",
)
PROCESSES = flags.DEFINE_integer(
    "processes", None, "How many processes, with --coordinator=host:port."
)
PROCESS = flags.DEFINE_integer("process", None, "Which of them this is, from 0.")
CONNECT_SECONDS = flags.DEFINE_float(
    "connect_seconds",
    120.0,
    "How long the processes wait for each other at the start.",
    lower_bound=0,
)


def main(arguments: list[str]) -> None:
    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}")
    if not WORKDIR.value or CONFIG.value is None:
        raise UserError("give --config=configs/quickstart.py and --workdir=DIR")
    from vit_jax.parallel import distributed

    command.use_compilation_cache()
    with distributed.start(
        COORDINATOR.value, PROCESSES.value, PROCESS.value, CONNECT_SECONDS.value
    ) as peers:
        config = CONFIG.value
        if "data.path" in given_keys(config):
            from vit_jax.runs.choices.recognised import recognise

            recognise(config, given_keys(config))
        options = check(config, file=command.as_in_file(config))
        if peers.count > 1:
            peers.agree("the config", dict(leaves(options)))
            peers.agree("the code", command.code_version())

        from vit_jax.runs.choices import settle
        from vit_jax.runs.loop import train
        from vit_jax.runs.workdir import workdir_at

        workdir = workdir_at(WORKDIR.value)
        if options.auto != "none" and peers.count > 1:
            raise UserError(
                f"config.auto={options.auto!r} is for one process, and there are {peers.count}"
            )
        train(settle(options, given_keys(config), workdir), workdir, peers, started=STARTED)


if __name__ == "__main__":
    command.run(main)
