"""The training command with a disturbance; test_resume.py starts it.

The environment variable DISTURBANCE is one of:

- hang: the data source stops after 12 batches;
- pipe: the data source blocks before the first batch, because it opens a pipe that has no writer;
- memory: the process allocates 4 TB after 12 batches;
- terminate: SIGTERM arrives in the middle of an evaluation.
"""

import os
import signal
import tempfile
import time
from pathlib import Path

import jax

from vit_jax import command, main
from vit_jax.runs import assemble, evaluator


def hang(batches):
    for count, batch in enumerate(batches):
        while count == 12:
            time.sleep(1)
        yield batch


def pipe(batches):
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/image.jpg")
        Path(folder, "image.jpg").read_bytes()
    yield from batches


def memory(batches):
    for count, batch in enumerate(batches):
        if count == 12:
            jax.numpy.zeros((10**6, 10**6))
        yield batch


def terminate(batches):
    for count, batch in enumerate(batches):
        if count == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        yield batch


if __name__ == "__main__":
    training_batches, evaluation_batches = assemble.training_batches, evaluator.evaluation_batches
    in_training = {"hang": hang, "pipe": pipe, "memory": memory}
    if disturb := in_training.get(os.environ["DISTURBANCE"]):
        assemble.training_batches = lambda *args, **keys: disturb(training_batches(*args, **keys))
    else:
        evaluator.evaluation_batches = lambda *args, **keys: terminate(
            evaluation_batches(*args, **keys)
        )
    command.run(main.main)
