"""Automatic settings: values that a config leaves open, chosen by data, checkpoint and device.

The chosen values are printed with their reasons. A file of this folder with a function
`choose(settings)` chooses the values for one kind of training. `JOBS` maps `config.auto`
to the file.
"""

import itertools
import os
import re
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path

from vit_jax.config import check_options, check_values, leaves, with_values
from vit_jax.errors import UserError
from vit_jax.options.run import RunOptions
from vit_jax.runs.bucket import shown
from vit_jax.runs.choices.choice import Settings, in_words
from vit_jax.runs.choices.data_at import data_at
from vit_jax.runs.workdir import saved_run, steps_made

JOBS = {"finetune": "finetuning", "pretrain": "pretraining"}


def settle(
    options: RunOptions,
    user_keys: Collection[str],
    workdir: Path,
    log: Callable[[str], None] = print,
) -> RunOptions:
    """Returns the options with the automatic settings of `config.auto`.

    A resumed run keeps the values that were chosen when it was a new run.

    Raises:
      UserError: the values cannot be chosen, because data or checkpoint are missing, or there are
        too few images.
    """
    if options.auto == "none":
        return options
    user_values = {key: value for key, value in leaves(options) if key in user_keys}
    if (saved := saved_run(workdir)) and steps_made(workdir):
        values = dict(leaves(saved.config)) | user_values
        recognized = options.auto == "finetune" and "data.source" not in user_values
        if recognized and "data.path" in user_values:
            values["data.path"] = data_at(user_values["data.path"]).path
        options = with_values(options, values)
    else:
        settings = Settings(options, user_keys)
        import_module(f"{__name__}.{JOBS[options.auto]}").choose(settings)
        log(f"chosen for {shown(workdir)}; a flag changes each:")
        for line in in_words(settings.choices, user_values):
            log(line)
        options = settings.options
    try:
        check_values(dict(leaves(options)))
        check_options(options)
    except UserError as error:
        raise UserError(
            f"{error} (of the values that auto={options.auto!r} chose and those given)"
        ) from error
    return options


def next_workdir(path: str) -> str:
    """Returns the first new workdir `runs/NAME-N`, N = 1, 2, ..., for the data set at a path."""
    last = os.path.basename(path.rstrip("/")).removesuffix(".csv").rpartition(":")[2]
    name = re.sub(r"[^\w.-]+", "_", last) or "images"
    workdirs = (f"runs/{name}-{number}" for number in itertools.count(1))
    return next(workdir for workdir in workdirs if not os.path.exists(workdir))
