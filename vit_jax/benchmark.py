"""Measures this machine: python -m vit_jax.benchmark overhead

overhead: host time of a training step of the quickstart, outside the compiled program.
"""

import time

import numpy as np

from vit_jax import command
from vit_jax.errors import UserError, nearest


def overhead(steps: int = 100) -> None:
    """Prints what the host does for a step before the devices can start on it.

    Each step begins when the one before has ended, so nothing of this is hidden behind the
    computation, as most of it is in a run. Decoding goes on beside it, as in a run.
    """
    import jax
    from flax import nnx

    from vit_jax.config import base_config
    from vit_jax.data.pipeline import SkipLog, training_batches
    from vit_jax.data.sources import open_source
    from vit_jax.models import model_factory
    from vit_jax.parallel.host import keep_freed_memory, share_interpreter
    from vit_jax.parallel.mesh import make_mesh, replicated, split_batch
    from vit_jax.training.feed import Feed
    from vit_jax.training.optimizer import make_optimizer, make_schedule
    from vit_jax.training.step import init_metrics, init_state, make_train_step
    from vit_jax.training.workdir import model_arguments

    share_interpreter()
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    config = base_config()
    config.batch_size = 128
    config.model.update(dict(name="ViT-Ti/4", dim=64, depth=3, hidden=128, heads=4))
    config.data.update(dict(image_size=16, crop_area=(0.6, 1.0), flip=False))
    source = open_source("digits", "train")
    model = model_factory(num_classes=10, **model_arguments(config))(rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    mesh = make_mesh()
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, 1_000_000))
    state = jax.device_put(init_state(nnx.to_pure_dict(params), optimizer), replicated(mesh))
    metrics = jax.device_put(init_metrics(), replicated(mesh))
    train_step = make_train_step(graphdef, optimizer, config, mesh)
    batches = training_batches(
        source,
        seed=0,
        batch_size=config.batch_size,
        first_step=0,
        image_size=16,
        crop_area=config.data.crop_area,
        crop_aspect=config.data.crop_aspect,
        flip=False,
        workers=0,
    )
    feed = Feed(batches, SkipLog(source, 0, print).check, split_batch(mesh))
    clock = time.perf_counter
    rows = []
    batch = next(feed)
    for _ in range(steps + 10):
        started = clock()
        state, metrics = train_step(state, metrics, batch)
        dispatched = clock()
        batch = next(feed)
        taken = clock()
        jax.block_until_ready(state)
        rows.append(np.diff([started, dispatched, taken, clock()]))
    feed.close()
    dispatch, take, program = np.median(rows[10:], axis=0) * 1e3
    print(f"start the program       {dispatch:8.3f} ms")
    print(f"take the next batch     {take:8.3f} ms")
    print(f"host overhead           {dispatch + take:8.3f} ms a step (median of {steps})")
    print(f"the program itself      {program:8.3f} ms")


BENCHMARKS = {"overhead": overhead}


def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0] not in BENCHMARKS:
        given = arguments[0] if arguments else ""
        raise UserError(f"unknown benchmark {given!r}; {nearest(given, BENCHMARKS)}")
    command.use_compilation_cache()
    BENCHMARKS[arguments[0]]()


if __name__ == "__main__":
    command.run(main)
