"""Measures this machine: python -m vit_jax.benchmark overhead

overhead: host time of a training step of --config, outside the compiled program.
load: time and memory of `load_model` for a ViT-L/16 of 1.2 GB in each format, beside reading the file.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from ml_collections import config_flags

from vit_jax import command
from vit_jax.config import check
from vit_jax.errors import UserError, nearest

CONFIG = config_flags.DEFINE_config_file("config", "configs/quickstart.py", "The job that is measured.")


def overhead(steps: int = 100) -> None:
    """Prints what the host does for a step, while the devices have nothing to do.

    Each step begins when the one before has ended, so nothing of this is hidden behind the
    computation, as most of it is in a run. Decoding goes on beside it, as in a run.
    """
    import jax
    from flax import nnx

    from vit_jax.models import model_factory
    from vit_jax.parallel.host import keep_freed_memory, share_interpreter
    from vit_jax.parallel.mesh import make_mesh, replicated
    from vit_jax.training.loop import class_count, open_feed, open_sources
    from vit_jax.training.optimizer import make_optimizer
    from vit_jax.training.step import init_metrics, init_state, make_train_step
    from vit_jax.training.workdir import model_arguments

    share_interpreter()
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    config = CONFIG.value
    check(config)
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


def load(runs: int = 5) -> None:
    """Prints how long `load_model` takes for each format, and how much memory besides the model.

    The file is read beside it the way its format is read otherwise, `np.load` or safetensors'
    `load_file`. The two take turns, each in a process of its own: cold, with the file on the disk
    alone, and warm, with the file in the system's cache.
    """
    from vit_jax.interop.checkpoint import complete, save, skeleton
    from vit_jax.models import model_factory

    factory = model_factory("ViT-L/16", num_classes=1000, image_size=224)
    values = complete(factory.func, factory.keywords)
    rng = np.random.default_rng(0)
    _, shapes = skeleton(factory.func, values)
    params = {path: rng.standard_normal(shape, np.float32) for path, shape in shapes.items()}
    size = sum(x.nbytes for x in params.values())
    print(f"ViT-L/16, {size / 1e9:.2f} GB, medians of {runs} turns")
    with tempfile.TemporaryDirectory() as folder:
        for library, name in dict(google="model.npz", timm="timm", transformers="transformers").items():
            path = Path(folder) / name
            save(path, library, factory.func, values, params.__getitem__)
            file = path if path.is_file() else path / "model.safetensors"
            for state in ("cold", "warm"):
                turns = []
                for _ in range(runs):
                    turn = []
                    for task, place in ((_read_arrays, file), (_load_model, path)):
                        if state == "cold":
                            _forget(file)
                        turn.append(_alone(task, place))
                    turns.append(turn)
                plain, ours = (statistics.median(turn[i][0] for turn in turns) for i in (0, 1))
                ratio = statistics.median(turn[1][0] / turn[0][0] for turn in turns)
                beyond = statistics.median(turn[1][1] for turn in turns) - size
                times = f"read {plain:5.2f} s, load_model {ours:5.2f} s, ratio {ratio:4.2f}"
                print(
                    f"{library:13}{state}  {times}; memory beyond the model {beyond / size:4.2f} x its size"
                )


def _forget(file: Path) -> None:
    """Drops a file from the system's cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _alone(task: Callable[[Path], None], path: Path) -> tuple[float, int]:
    """Seconds and peak memory in bytes of a task in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (task, path))


def _measured(task: Callable, path: Path) -> tuple[float, int]:
    import jax

    import vit_jax.load  # noqa: F401  (Imports are not what is measured.)

    jax.block_until_ready(jax.device_put(np.zeros(1)))
    before = _peak_memory()
    started = time.perf_counter()
    result = task(path)
    seconds = time.perf_counter() - started
    del result
    return seconds, _peak_memory() - before


def _peak_memory() -> int:
    """Bytes of this process at its largest, pages of mapped files among them."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def _read_arrays(file: Path) -> dict[str, np.ndarray]:
    if file.suffix == ".npz":
        with np.load(file) as arrays:
            return dict(arrays)
    from safetensors.numpy import load_file

    return load_file(file)


def _load_model(path: Path) -> object:
    import jax
    from flax import nnx

    import vit_jax

    return jax.block_until_ready(nnx.state(vit_jax.load_model(path, say=str)))


BENCHMARKS = {"overhead": overhead, "load": load}


def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0] not in BENCHMARKS:
        given = arguments[0] if arguments else ""
        raise UserError(f"unknown benchmark {given!r}; {nearest(given, BENCHMARKS)}")
    command.use_compilation_cache()
    BENCHMARKS[arguments[0]]()


if __name__ == "__main__":
    command.run(main)
