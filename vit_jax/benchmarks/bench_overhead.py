"""Host time of a training step, outside the compiled program."""

import time

import jax
import numpy as np

from vit_jax.benchmarks.figures import Table
from vit_jax.options.run import RunOptions
from vit_jax.parallel.process_settings import keep_freed_memory, share_interpreter
from vit_jax.runs.assemble import assemble, open_feed


def measure(config: RunOptions, steps: int = 100) -> dict:
    """Prints and returns the time per step that the host spends outside the compiled program.

    In training most of the host's work overlaps with the computation on the devices. Here each step
    starts after the end of the previous one, so all of the host's work is measured. Images are
    decoded in parallel, as in training.
    """
    share_interpreter()
    keep_freed_memory()
    parts = assemble(config)
    program = parts.program
    state, metrics = program.initial_state(config.seed), program.initial_metrics()
    feed = open_feed(parts.config, parts.splits.train, 0, print, parts.mesh)

    clock = time.perf_counter
    rows = []
    batch = feed.take()
    for _ in range(steps + 10):
        started = clock()
        state, metrics = program.train_step(state, metrics, batch)
        dispatched = clock()
        batch = feed.take()
        taken = clock()
        jax.block_until_ready(state)
        rows.append(np.diff([started, dispatched, taken, clock()]))
    feed.close()
    dispatch, take, program = np.median(rows[10:], axis=0) * 1e3
    table = Table("part of a step", {f"ms (median of {steps})": ".3f"})
    table.row("start the program", dispatch)
    table.row("take the next batch", take)
    table.row("host overhead, both", dispatch + take)
    table.row("the program itself", program)
    return table.figures
