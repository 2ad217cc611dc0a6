"""Time and memory of `load_model` for a ViT-L/16 of 1.2 GB in each format, beside reading the file."""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vit_jax.interop.checkpoint import complete, save, skeleton
from vit_jax.models import model_factory


def measure(runs: int = 5) -> None:
    """Prints how long `load_model` takes for each format, and how much memory besides the model.

    The file is read beside it the way its format is read otherwise, `np.load` or safetensors'
    `load_file`. The two take turns, each in a process of its own: cold, with the file on the disk
    alone, and warm, with the file in the system's cache.
    """
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
