"""Progress page of a running study: the states of its runs, and its pictures so far."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vit_jax.inspection.html_page import Section, inline, picture, write_page
from vit_jax.progress import duration

if TYPE_CHECKING:
    from vit_jax.ledger.study import Study, Trial

REFRESH_SECONDS = 20


def write_progress(path: Path, title: str, study: "Study", pictures: Sequence[str]) -> None:
    """Writes the page, which reloads itself.

    Args:
      path: of the page.
      title: of the page.
      study: the running study.
      pictures: names of files in the page's folder.
    """
    rows = "".join(
        f"<tr><td>{html.escape(cell)}</td>" + f"<td>{html.escape(state_of(study, trial))}</td></tr>"
        for trial in study.trials
        for cell in [str(trial.job.workdir.relative_to(study.out))]
    )
    done, failed = len(study.finished()), len(study.failures)
    counts = f"{done} of {len(study.trials)} runs that are known so far" + (
        f", {failed} failed" * bool(failed)
    )
    counts += (
        f"; about {duration(study.left)} left of the stage that is under way" if study.left else ""
    )
    drawn = {name: path.with_name(name).read_bytes() for name in pictures}
    write_page(
        path,
        title,
        [
            Section("", f"<p>{counts}.</p>", ""),
            Section(
                "Results so far", "".join(picture(name, inline(png)) for name, png in drawn.items())
            ),
            Section("Runs", f"<table>{rows}</table>", ""),
        ],
        REFRESH_SECONDS,
    )


def state_of(study: "Study", trial: "Trial") -> str:
    """Returns the accuracy or loss of a finished run, or the state of another run."""
    found = study.outcome(trial)
    if found.figures is None:
        return f"failed: {found.failure}" if found.failure else "to come"
    if "accuracy" in found.figures:
        return f"{found.figures['accuracy']:.2%}"
    return f"loss {found.figures['loss']:.4g}"
