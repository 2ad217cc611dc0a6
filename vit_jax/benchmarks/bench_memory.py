"""Plots the memory of the input pipeline over a long run."""

import contextlib
import multiprocessing
import statistics
from concurrent import futures
from pathlib import Path

from vit_jax.benchmarks.figures import Table
from vit_jax.data.pipeline import training_batches
from vit_jax.data.preprocess import TrainCrop
from vit_jax.data.sources.digits import digits

BATCH, EVERY = 16, 500


def measure(batches: int = 100_000, out: str | None = None) -> dict:
    """Reads batches without and with worker processes, and plots the memory over the batches.

    The memory is the proportional set size (PSS) of the reading process and its workers.

    Args:
      out: folder for the plot, input_memory.png; None: the current folder.
    """
    import matplotlib.pyplot as plt

    print(f"{batches:,} batches of {BATCH}")
    columns = {"MB in the second tenth": ",.1f", "MB in the last tenth": ",.1f", "growth": "+.2%"}
    table = Table("workers", columns)
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for workers in (0, 2):
        # Each measurement runs in a new process, because memory of an earlier measurement would be
        # counted.
        with futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            steps, megabytes = pool.submit(_watch, batches, workers).result()
        tenth = max(1, len(steps) // 10)
        # The mean memory in the second tenth of the run is compared with the last tenth. A very
        # short run has no second tenth: there the mean of all measurements is used instead.
        early = statistics.mean(megabytes[tenth : 2 * tenth] or megabytes)
        late = statistics.mean(megabytes[-tenth:])
        table.row(str(workers), early, late, late / early - 1)
        axes.plot(steps, megabytes, label=f"{workers} workers")
    axes.set(xlabel="batches read", ylabel="memory, MB", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    picture = Path(out or ".") / "input_memory.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    print(f"plot: {picture}")
    return table.figures


def _watch(batches: int, workers: int) -> tuple[list[int], list[float]]:
    from absl import flags

    flags.FLAGS(["benchmark"], known_only=True)  # Grain's workers require parsed flags.
    arguments = dict(seed=0, batch_size=BATCH, first_step=0, crop=TrainCrop(16), workers=workers)
    steps, megabytes = [], []
    with contextlib.closing(training_batches(digits("train"), **arguments)) as reader:
        for step in range(batches):
            next(reader)
            if step % EVERY == 0:
                steps.append(step)
                megabytes.append(_memory() / 1e6)
    return steps, megabytes


def _memory() -> int:
    """Returns the memory of this process and its children in bytes."""
    processes = ["self", *(child.pid for child in multiprocessing.active_children())]
    files = (Path(f"/proc/{process}/smaps_rollup").read_text() for process in processes)
    lines = (line for text in files for line in text.splitlines() if line.startswith("Pss:"))
    return sum(int(line.split()[1]) * 1024 for line in lines)
