"""Times the start of the input pipeline at example 10, and at example 100 million.

A training run that resumes at a late step starts its input pipeline at a late example.
"""

import contextlib
import statistics
import subprocess
import sys
import time

from vit_jax.benchmarks.figures import Table
from vit_jax.data.pipeline import training_batches
from vit_jax.data.preprocess import TrainCrop
from vit_jax.data.sources.synthetic import Synthetic

BATCH = 10
EXAMPLES = (10, 100_000_000)


def measure(rounds: int = 7) -> dict:
    """Prints and returns the seconds from the start of a process until its first batch.

    The first batch starts at the 10th or at the 100,000,000th example (`EXAMPLES`) of a source with
    a billion generated images. Measurements with these two examples alternate, for `rounds` rounds.
    """
    turns = [[_alone(example) for example in EXAMPLES] for _ in range(rounds)]
    medians = [statistics.median(times) for times in zip(*turns, strict=True)]
    columns = {"seconds from the start of the process": ".3f", "relative to the first": ".3f"}
    table = Table("first batch at example", columns)
    for example, seconds in zip(EXAMPLES, medians, strict=True):
        table.row(f"{example:,}", seconds, seconds / medians[0])
    return table.figures


def _alone(example: int) -> float:
    started, module = time.perf_counter(), "vit_jax.benchmarks.bench_resume"
    subprocess.run([sys.executable, "-m", module, str(example)], check=True)
    return time.perf_counter() - started


def _first_batch(example: int) -> None:
    arguments = dict(seed=0, batch_size=BATCH, crop=TrainCrop(224), workers=0)
    source = Synthetic(image_size=224, num_classes=10, size=10**9)
    batches = training_batches(source, first_step=example // BATCH, **arguments)
    with contextlib.closing(batches):
        next(batches)


if __name__ == "__main__":
    _first_batch(int(sys.argv[1]))
