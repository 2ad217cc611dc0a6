"""Experiment trackers, in addition to the files of a workdir.

Each file of this folder with a class `Tracker` supports one library, such as W&B. The interface is
in `tracker.py`, and `TRACKERS` (`options/run.py`) lists the files. Server, project and user are set
by the environment variables of the libraries.
"""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from vit_jax.config import leaves
from vit_jax.errors import as_text
from vit_jax.runs.bucket import shown
from vit_jax.runs.run_page import title_of
from vit_jax.runs.trackers.delivery import Delivery, Say
from vit_jax.runs.trackers.tracker import RunFacts
from vit_jax.runs.workdir import saved_run


def deliveries(
    names: Sequence[str], workdir: Path, rows: Sequence[dict], log: Say
) -> list[Delivery]:
    """Opens trackers for the run in a workdir, and sends them the metrics not sent before.

    Raises:
      UserError: the library of a tracker is not installed, or the first connection of a new run
        fails. Later connections are tried again while the run continues.
    """
    saved = saved_run(workdir)
    values = {key: as_text(x) if isinstance(x, str) else x for key, x in leaves(saved.config)}
    place, title = as_text(shown(workdir)), as_text(title_of(saved))
    facts = RunFacts(workdir, place, title, values, json.loads(saved.text))
    opened = []
    try:
        for name in names:
            kind = import_module(f"{__name__}.{name}").Tracker
            opened.append(Delivery(name, kind, facts, rows, log))
    except BaseException:
        for delivery in opened:
            delivery.close()
        raise
    return opened
