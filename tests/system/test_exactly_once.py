"""Data are read exactly once per epoch by real processes that are killed and replaced by others."""

import random
import subprocess
import sys
import time

import pytest

from tests.system.conftest import ROOT

IMAGES, BATCH, EPOCHS = 480, 16, 2  # 30 batches per epoch.

# A process that reads its part of each batch, and then records the images of the batch.
READER = """
import sys, time
import numpy as np
from vit_jax.data.pipeline import training_batches
from vit_jax.data.preprocess import TrainCrop
from vit_jax.data.sources.in_memory import InMemory

images, batch, steps, first_step, process, processes = map(int, sys.argv[1:7])
pixels = np.zeros((images, 4, 4, 3), np.uint8)
source = InMemory("numbered", pixels, np.arange(images), tuple(map(str, range(images))))
batches = training_batches(
    source, seed=5, batch_size=batch, first_step=first_step, crop=TrainCrop(4), workers=0,
    rows=np.arange(batch).reshape(processes, -1)[process],
)
with open(sys.argv[7], "a", buffering=1) as log:
    for step in range(first_step, steps):
        log.write(f"{step} {' '.join(map(str, next(batches)['labels'][:, 0]))}\\n")
        time.sleep(0.01)
sys.stdin.read()  # Until it is killed, or at once without an input.
"""
# The largest number of steps that a process reads after the steps that this process waits for.
AHEAD = 5


def read(
    folder, first_step: int, steps: int, processes: int, kill_after: int | None
) -> dict[int, list[int]]:
    """Returns the image indices of each step that all processes finished, as a checkpoint would."""
    last = steps if kill_after is None else first_step + kill_after + AHEAD
    logs = [folder / f"{first_step}-{i}-of-{processes}" for i in range(processes)]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", READER]
            + [str(x) for x in (IMAGES, BATCH, last, first_step, i, processes, log)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL if kill_after is None else subprocess.PIPE,
        )
        for i, log in enumerate(logs)
    ]
    try:
        while kill_after is not None and not all(lines(log) >= kill_after for log in logs):
            assert all(process.poll() is None for process in running)
            time.sleep(0.01)
        if kill_after is None:
            assert [process.wait(120) for process in running] == [0] * processes
    finally:
        for process in running:
            process.kill()
            process.wait()
    seen = [{int(line.split()[0]): line.split()[1:] for line in whole_lines(log)} for log in logs]
    done = set.intersection(*(set(part) for part in seen))
    return {step: [int(x) for part in seen for x in part[step]] for step in done}


def whole_lines(log) -> list[str]:
    return log.read_text().split("\n")[:-1] if log.exists() else []


def lines(log) -> int:
    return len(whole_lines(log))


@pytest.mark.slow
def test_epoch_is_seen_once_across_kills_and_process_counts(tmp_path):
    counts = 1, 4, 2  # The number of processes increases and decreases.
    steps = EPOCHS * IMAGES // BATCH
    rng = random.Random(sum(counts) + counts[0])
    seen, first_step = {}, 0
    for i, processes in enumerate(counts):
        last = i == len(counts) - 1
        kept = read(tmp_path, first_step, steps, processes, None if last else rng.randint(5, 20))
        # A checkpoint may be older than the last finished step.
        first_step = steps if last else max(kept) + 1 - rng.randint(0, 3)
        seen |= {step: images for step, images in kept.items() if step < first_step}
    assert sorted(seen) == list(range(steps))
    for epoch in range(EPOCHS):
        here = range(epoch * IMAGES // BATCH, (epoch + 1) * IMAGES // BATCH)
        assert sorted(image for step in here for image in seen[step]) == list(range(IMAGES))
