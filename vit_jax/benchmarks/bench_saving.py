"""Times training with a checkpoint every 20 steps, compared with training without checkpoints."""

import statistics
import tempfile
import time
from pathlib import Path

import jax

from vit_jax.benchmarks.figures import Table
from vit_jax.config import base_config, run_options
from vit_jax.parallel.mesh import make_mesh
from vit_jax.parallel.process_settings import keep_freed_memory, share_interpreter
from vit_jax.runs.assemble import open_feed
from vit_jax.runs.checkpoints import Checkpoints, as_items
from vit_jax.runs.splits import open_splits
from vit_jax.training.program import make_program

EVERY = 20


def measure(pairs: int = 6) -> dict:
    """Prints and returns the speed of training with a checkpoint every 20 steps, and without.

    The benchmark trains a ViT-Ti/16 with batch size 8. Turns of 20 steps with and without a
    checkpoint alternate; a turn with a checkpoint ends when the checkpoint is written.

    The ratio of the two speeds is similar for larger models and devices, because the size of a
    checkpoint and the FLOPs of a step both grow with the number of parameters. In this benchmark on
    two CPU cores, 3 MB of checkpoints are written per second. On a TPU v3 with 64 hosts, each host
    would also write 3 MB per second, with 64 images per core and an MFU of 40 %.
    """
    config = base_config()
    config.model.name, config.data.source, config.data.num_classes = "ViT-Ti/16", "synthetic", 1000
    config.batch_size, config.steps = 8, 10**6
    share_interpreter()
    keep_freed_memory()
    options = run_options(config)
    source = open_splits(options).train
    mesh = make_mesh(config.mesh)
    program = make_program(options, num_classes=1000, steps=config.steps, mesh=mesh)
    state, metrics = program.initial_state(config.seed), program.initial_metrics()
    feed = open_feed(options, source, 0, print, program.mesh)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    saved = f"a checkpoint of {size / 1e6:.0f} MB every {EVERY} steps"
    print(f"ViT-Ti/16, batch {config.batch_size}, {saved}")

    step, seconds, blocked = 0, {True: [], False: []}, []
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(Path(folder), keep_last=2) as checkpoints,
    ):
        for turn in range(-1, 2 * pairs):  # Turn -1 compiles.
            saving = turn % 2 == (turn // 2) % 2 or turn < 0  # The order of a pair alternates.
            started = time.perf_counter()
            for _ in range(EVERY):
                step += 1
                state, metrics = program.train_step(state, metrics, feed.take())
                if saving and step % EVERY == 1:
                    jax.block_until_ready(state)  # The time of the steps must not count as saving.
                    before = time.perf_counter()
                    checkpoints.save(step, as_items(state, metrics))
                    blocked.append(time.perf_counter() - before)
            jax.block_until_ready(state)
            checkpoints.wait()
            if turn >= 0:
                seconds[saving].append(time.perf_counter() - started)
                took = f"{seconds[saving][-1]:.1f} s {'with' if saving else 'without'}"
                print(f"turn {turn + 1}/{2 * pairs}: {took}", flush=True)
    feed.close()
    without, with_saving = (statistics.median(seconds[kind]) for kind in (False, True))
    ratio = statistics.median(a / b for a, b in zip(seconds[False], seconds[True], strict=True))
    table = Table("medians", {"value": ".3f"})
    table.row("without saving, images/s", EVERY * config.batch_size / without)
    table.row("with saving, images/s", EVERY * config.batch_size / with_saving)
    table.row("ratio", ratio)
    table.row("writing, MB/s", size / with_saving / 1e6)
    table.row("delay of a step by a save, s", statistics.median(blocked[1:]))
    return table.figures
