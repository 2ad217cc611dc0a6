"""Writes progress.html, a page about a running study: the states of its runs, and pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vit_jax.inspection.html_page import inline, render, write_text
from vit_jax.progress import duration

if TYPE_CHECKING:
    from vit_jax.ledger.study import Study, Trial

REFRESH_SECONDS = 20


def write_progress(path: Path, title: str, study: "Study", pictures: Sequence[str]) -> None:
    """Writes the page, which an open browser reloads; `pictures` are files in its folder."""
    done, failed = len(study.finished()), len(study.failures)
    counts = f"{done} of {len(study.trials)} runs that are known so far" + (
        f", {failed} failed" * bool(failed)
    )
    counts += (
        f"; about {duration(study.left)} left of the stage that is under way" if study.left else ""
    )
    page = render(
        "progress.html",
        title=title,
        refresh=REFRESH_SECONDS,
        counts=counts,
        pictures_so_far={name: inline(path.with_name(name).read_bytes()) for name in pictures},
        states={
            str(trial.job.workdir.relative_to(study.out)): state_of(study, trial)
            for trial in study.trials
        },
    )
    write_text(path, page)


def state_of(study: "Study", trial: "Trial") -> str:
    """Returns the accuracy or loss of a finished run, or the state of an unfinished run."""
    found = study.outcome(trial)
    if found.figures is None:
        return f"failed: {found.failure}" if found.failure else "to come"
    if "accuracy" in found.figures:
        return f"{found.figures['accuracy']:.2%}"
    return f"loss {found.figures['loss']:.4g}"
