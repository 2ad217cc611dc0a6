"""Host time of a training step, outside the compiled program."""

import time

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.models import model_factory
from vit_jax.parallel.host import keep_freed_memory, share_interpreter
from vit_jax.parallel.mesh import make_mesh, replicated
from vit_jax.training.loop import class_count, open_feed, open_sources
from vit_jax.training.optimizer import make_optimizer
from vit_jax.training.step import init_metrics, init_state, make_train_step
from vit_jax.training.workdir import model_arguments


def measure(config: ConfigDict, steps: int = 100) -> None:
    """Prints what the host does for a step, while the devices have nothing to do.

    Each step begins when the one before has ended, so nothing of this is hidden behind the
    computation, as most of it is in a run. Decoding goes on beside it, as in a run.
    """
    share_interpreter()
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    source, _ = open_sources(config)
    build = model_factory(num_classes=class_count(config, source), **model_arguments(config))
    graphdef, params = nnx.split(build(rngs=nnx.Rngs(config.seed)))
    mesh = make_mesh()
    optimizer = make_optimizer(config.optimizer, lambda step: config.optimizer.learning_rate)
    state = jax.device_put(init_state(nnx.to_pure_dict(params), optimizer), replicated(mesh))
    metrics = jax.device_put(init_metrics(), replicated(mesh))
    train_step = make_train_step(graphdef, optimizer, config, mesh)
    feed = open_feed(config, source, 0, print, mesh)

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
