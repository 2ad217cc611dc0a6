"""Experiment trackers, in addition to the files of a workdir.

Each is a file of this folder with a class `Tracker` (the interface is in `tracker.py`) and an entry
in `TRACKERS` (`options/run.py`). The libraries' environment variables set server, project and user.
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
    """Opens trackers for the run in a workdir, and sends them its missing rows.

    Args:
      rows: rows that the run has written.

    Raises:
      UserError: a library is missing or fails at the run's first connection. Later failures are
        retried while the run continues.
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
