"""The training command with a record of each step's images; `soak.py` starts it.

The environment variable RECORD names the file of the record, and PACE is the minimum duration of a
step in seconds.
"""

import os
import time

from vit_jax import command, main
from vit_jax.runs import assemble
from vit_jax.training.program import Program, make_program


def recorded_program(*arguments, **keywords) -> Program:
    program = make_program(*arguments, **keywords)
    step = None

    def train_step(state, metrics, batch):
        nonlocal step
        step = int(state["step"]) + 1 if step is None else step + 1
        shards = [shard for shard in batch["labels"].addressable_shards if shard.replica_id == 0]
        numbers = [str(number) for shard in shards for number in shard.data[:, 0]]
        record.write(f"{step} {' '.join(numbers)}\n")
        time.sleep(float(os.environ["PACE"]))
        return program.train_step(state, metrics, batch)

    return program._replace(train_step=train_step)


if __name__ == "__main__":
    with open(os.environ["RECORD"], "a", buffering=1) as record:
        assemble.make_program = recorded_program
        command.run(main.main)
