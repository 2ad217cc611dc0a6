"""Time and memory of `load_model` for a ViT-L/16 in each format, compared with reading the file."""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vit_jax.benchmarks.figures import Table
from vit_jax.interop.checkpoint import sketch
from vit_jax.interop.writing import save
from vit_jax.models import model_options
from vit_jax.models.model_card import parameter_shapes


def measure(runs: int = 5) -> dict:
    """Prints and returns duration and memory of `load_model` for a model of 1.2 GB in each format.

    The memory is the peak memory minus the size of the model. For comparison, only the arrays of
    the file are read, by `np.load` or safetensors' `load_file`. `load_model` and the comparison
    alternate, each in a new process. Both are measured cold (the file is only on disk) and warm
    (the file is in the page cache).
    """
    options = model_options("ViT-L/16", num_classes=1000, image_size=224)
    rng = np.random.default_rng(0)
    shapes = parameter_shapes(sketch(options))
    params = {path: rng.standard_normal(shape, np.float32) for path, shape in shapes.items()}
    size = sum(x.nbytes for x in params.values())
    print(f"ViT-L/16, {size / 1e9:.2f} GB, medians of {runs} turns")
    columns = {"read, s": ".2f", "load_model, s": ".2f", "ratio": ".2f"}
    table = Table("format", columns | {"memory beyond the model, relative to its size": ".2f"})
    with tempfile.TemporaryDirectory() as folder:
        for library in ("google", "timm", "transformers"):
            path = Path(folder) / ("model.npz" if library == "google" else library)
            save(path, library, options, params.__getitem__)
            for state in ("cold", "warm"):
                turns = [_turn(path, is_cold=state == "cold") for _ in range(runs)]
                table.row(f"{library}, {state}", *_summary(turns, size))
    return table.figures


def _turn(path: Path, is_cold: bool) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns (seconds, peak bytes) of reading only the file's arrays, and of `load_model`."""
    file = path if path.is_file() else path / "model.safetensors"
    if is_cold:
        _forget(file)
    arrays = _alone(_read_arrays, file)
    if is_cold:
        _forget(file)
    return arrays, _alone(_load_model, path)


def _summary(
    turns: list[tuple[tuple[float, float], tuple[float, float]]], size: int
) -> tuple[float, ...]:
    """Returns the table's values: medians over the results of `_turn`; `size` is in bytes."""
    plain = statistics.median(arrays[0] for arrays, _ in turns)
    ours = statistics.median(model[0] for _, model in turns)
    ratio = statistics.median(model[0] / arrays[0] for arrays, model in turns)
    beyond = statistics.median(model[1] for _, model in turns) - size
    return plain, ours, ratio, beyond / size


def _forget(file: Path) -> None:
    """Removes a file from the operating system's page cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _alone(task: Callable[[Path], None], path: Path) -> tuple[float, int]:
    """Runs a task in a new process; returns its duration in seconds and peak memory in bytes."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (task, path))


def _measure(task: Callable, path: Path) -> tuple[float, int]:
    import jax

    import vit_jax.load  # noqa: F401  (So that imports are not measured.)

    jax.block_until_ready(jax.device_put(np.zeros(1)))
    before = _peak_memory()
    started = time.perf_counter()
    result = task(path)
    seconds = time.perf_counter() - started
    del result
    return seconds, _peak_memory() - before


def _peak_memory() -> int:
    """Returns the peak memory of this process in bytes, including pages of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM")]
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

    return jax.block_until_ready(nnx.state(vit_jax.load_model(path, log=str)))
