"""Training called from Python: from a notebook, or any other program."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from vit_jax.command import read_config
from vit_jax.config import check
from vit_jax.errors import UserError, mistake


def train(
    config: ConfigDict | str | Path,
    workdir: str | Path,
    *,
    train: Any = None,
    test: Any = None,
    on_log: Callable[[int, dict[str, float]], None] | None = None,
) -> dict[str, float]:
    """Trains a model, and keeps all of the run in `workdir`; called again, it goes on from there.

    The process stays as it was: no setting of JAX or Python is changed. While training goes on in the main
    thread, Ctrl-C (a notebook's stop button) saves a checkpoint and returns.

    Args:
      config: a config, or its file: `configs/quickstart.py`, or with an argument `FILE.py:ARGUMENT`.
      workdir: new, empty, or of an earlier start with the same config and data.
      train: the data set to train on, in place of the config's: `(images, labels)` as NumPy arrays, a
        `datasets.Dataset` of Hugging Face, a torch `Dataset`, or any object with `__len__` and `__getitem__`
        (`vit_jax.data.sources.handed_in` says what its items may be). An example must give the same image
        each time: the config says how it is cropped and augmented.
      test: the data set to evaluate on. Without it the config's splits cut it out of `train`, such as
        `config.data.train_split = "train[:90%]"` and `config.data.test_split = "train[90%:]"`.
      on_log: is called with the step and its figures by name, as they are written to `metrics.jsonl`.

    Returns:
      The figures of the test images, such as `{"accuracy": 0.97, "loss": 0.1, "images": 360.0}`; empty where
      the run was stopped before its end.

    Raises:
      UserError: the config, the data and the workdir do not fit each other; the loss is no longer finite; the
        disk or the memory is full. Its message is one line.
    """
    config = config if isinstance(config, ConfigDict) else read_config(str(config))
    config = config.copy_and_resolve_references()
    data = None
    if train is not None or test is not None:
        data = {name: given for name, given in (("train", train), ("test", test)) if given is not None}
        config.unlock()
        config.update_from_flattened_dict(
            {"data.source": "handed_in", "data.path": "", "data.parts": None, "data.weights": None}
        )
        config.lock()
    check(config)

    from vit_jax.runs.caller import Caller
    from vit_jax.runs.loop import train as run
    from vit_jax.runs.workdir import absolute

    try:
        return run(config, absolute(workdir), caller=Caller(data, on_log))
    except UserError:
        raise
    except Exception as error:
        if message := mistake(error):
            raise UserError(message) from error
        raise
