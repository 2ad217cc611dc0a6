"""The training command with a disturbance, DISTURBANCE: test_resume.py starts it.

hang: the data source stands still after 12 batches.
terminate: SIGTERM comes in the middle of an evaluation.
"""

import os
import signal
import time

from vit_jax import command, main
from vit_jax.training import evaluator, loop


def hang(batches):
    for count, batch in enumerate(batches):
        while count == 12:
            time.sleep(1)
        yield batch


def terminate(batches):
    for count, batch in enumerate(batches):
        if count == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        yield batch


if __name__ == "__main__":
    training_batches, evaluation_batches = loop.training_batches, evaluator.evaluation_batches
    if os.environ["DISTURBANCE"] == "hang":
        loop.training_batches = lambda *args, **keys: hang(training_batches(*args, **keys))
    else:
        evaluator.evaluation_batches = lambda *args, **keys: terminate(evaluation_batches(*args, **keys))
    command.run(main.main)
