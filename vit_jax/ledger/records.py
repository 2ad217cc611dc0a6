"""Records of experiments, one JSON file each: results, command, commit, versions and machine.

Records are committed in experiments/records. A record may be made before all runs are finished, and
from runs of several machines. The person who makes a record writes the verdict: whether the results
support the paper's claim, and the differences from the paper.
"""

import datetime
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_jax.errors import UserError
from vit_jax.ledger.study import STUDY, Experiment, Figures, Study, known_trials
from vit_jax.runs.workdir import commit_of_package, saved_run, versions_here
from vit_jax.shipped import EXPERIMENTS, PACKAGE

ROOT = PACKAGE.parent
RECORDS, PICTURES = EXPERIMENTS / "records", ROOT / "docs" / "images" / "ledger"
# The possible first words of a verdict, with the texts that pages show.
VERDICTS = {
    "agrees": "agrees with the claim",
    "agrees in part": "agrees with the claim in part",
    "contradicts": "contradicts the claim",
    "not seen at this scale": "not seen at this scale",
    "cannot tell": "cannot tell whether the claim holds",
}
SCALE = re.compile(r"(At [^:]+): (?=\S)")  # The scale, at the start of a verdict's reason.


def make_record(name: str, experiment: Experiment, folders: Sequence[Path]) -> dict[str, Any]:
    """Makes an experiment's record from its finished runs in its folder, and in other folders.

    Raises:
      UserError: none of the experiment's runs in these folders is finished, the commit of a run is
        unknown, or the study is only a trial of a few steps.
    """
    about = read_study(folders)
    if about.get("steps"):
        raise UserError(
            f"{folders[0]} is a trial of {about['steps']} steps a run, which is not recorded"
        )
    study = Study(folders[0], about["options"], scale=about["scale"], places=folders)
    scaled = experiment.at(study.scale)
    trials, finished = known_trials(scaled, study), study.finished()
    if scaled.stages and not finished:
        raise UserError(f"no run of {name} is finished in {', '.join(map(str, folders))}")
    manifests = [saved_run(trial.job.workdir).manifest for trial in finished]
    begun = time.monotonic()
    figures = json.loads(json.dumps(scaled.read(study)))
    seconds = [study.outcome(trial).figures["seconds"] for trial in finished]
    return {
        "experiment": name,
        "claim": experiment.claim,
        "place": experiment.place,
        "scale": study.scale,
        "command": command_of(name, study),
        "commit": commits(manifests, [trial.job.name for trial in finished]),
        "date": datetime.date.today().isoformat(),
        "versions": manifests[0]["versions"] if manifests else versions_here(),
        "machine": machine(manifests),
        "seconds": round(
            sum(seconds) if scaled.stages else about.get("seconds", time.monotonic() - begun)
        ),
        "runs": {"finished": len(finished), "known": len(trials), "failed": len(study.failures)},
        "seeds": sorted({trial.factors.get("seed", 0) for trial in finished}),
        "figures": figures,
        "finding": scaled.finding(figures) if scaled.finding else "",
    } | compare_with_published(experiment, scaled, figures)


def compare_with_published(
    experiment: Experiment, scaled: Experiment, figures: Figures
) -> dict[str, Any]:
    """Returns the part of a record that compares our results with published results.

    Returns:
      A dict with `published`, the published values by row and column, and `difference`, our values
      minus the published values. If there are no comparable values, `published` is a text with the
      reason, and `difference` is empty.
    """
    pairs = {row: cells for row, cells in scaled.pairs(figures).items() if cells}
    if not pairs:
        return {"published": why_apart(experiment), "difference": {}}
    rounded = {
        row: {
            name: (round(paper, 6), round(ours - paper, 6)) for name, (paper, ours) in cells.items()
        }
        for row, cells in pairs.items()
    }
    return {
        key: {
            row: {name: both[place] for name, both in cells.items()}
            for row, cells in rounded.items()
        }
        for place, key in enumerate(("published", "difference"))
    }


def why_apart(experiment: Experiment) -> str:
    """Returns the reason why an experiment has no comparable published values."""
    if not experiment.place:
        return "nothing: the experiment is our own"
    if experiment.place.startswith("Figure"):
        return "a picture without numbers: only orderings in its text can be compared"
    if experiment.place.startswith("Section"):
        return "a sentence without figures"
    return "figures of other data and models: orderings can be compared alone"


def read_study(folders: Sequence[Path]) -> dict[str, Any]:
    """Reads the scale and the flags of an experiment from `study.json` in its first folder.

    If there is no such file, the folder contains separate runs at the paper's scale.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}")
    file = folders[0] / STUDY
    return json.loads(file.read_text()) if file.exists() else {"scale": "paper", "options": {}}


def command_of(name: str, study: Study) -> str:
    """Returns the command that reproduces the results of an experiment.

    An absolute path is replaced by the flag's name: `--wheel=/data/x.whl` becomes `--wheel=WHEEL`.
    """
    scale = "" if study.scale == "laptop" else f" --scale={study.scale}"
    flags = ""
    for key, value in study.options.items():
        if isinstance(value, str | Path) and Path(value).is_absolute():
            flags += f" --{key}={key.upper()}"
        elif value:
            flags += f" --{key} {as_words(value)}"
    return f"python -m vit_jax.experiment {name}{flags}{scale} --out=DIR"


def as_words(value: Any) -> str:
    """Formats the value of a flag, or its list of values, for the command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def commits(manifests: Sequence[Mapping], names: Sequence[str]) -> str:
    """Returns the runs' commits, with commas; raises UserError if one is unknown."""
    found = [manifest.get("commit", "") for manifest in manifests] or [commit_of_package()]
    for commit, name in zip(found, [*names, "this"], strict=False):
        if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
            raise UserError(
                f"the commit of run {name} is {commit or 'not known'}: a record needs runs of a "
                "committed state; commit first and run it again"
            )
    return ", ".join(dict.fromkeys(commit[:10] for commit in found))


def machine(manifests: Sequence[Mapping]) -> str:
    """Describes the devices of the runs."""
    if not manifests:
        return f"{os.cpu_count()} cores"
    devices = dict.fromkeys(f"{m['devices']}, {m.get('cores', '?')} cores" for m in manifests)
    return "; ".join(devices)


def with_verdict(
    record: Mapping[str, Any], verdict: str = "", folder: Path = RECORDS
) -> dict[str, Any]:
    """Returns a record with its verdict.

    Args:
      verdict: text of the form `WORD: At SCALE: REASON`, where WORD is a key of `VERDICTS` and
        REASON is a sentence or two. Example:
        `contradicts: At 16 pixels, 1,200 steps: BiTs lead throughout.` Empty: the verdict of the
        experiment's earlier record in `folder` is used, if that record has the same results.

    Raises:
      UserError: the verdict is malformed, or it is empty and there is no record with these results.
    """
    path = path_of(record, folder)
    if not verdict and path.exists():
        before = json.loads(path.read_text())
        verdict = before.get("verdict", "") if before["figures"] == record["figures"] else ""
    word, _, reason = verdict.partition(": ")
    if word not in VERDICTS or not SCALE.match(reason):
        form = (
            f'--verdict="WORD: At 16 pixels, 1,200 steps: ..." with {", ".join(VERDICTS)} as WORD'
        )
        raise UserError(
            f"state whether these figures support the claim, and the differences: {form}"
        )
    return {**record, "verdict": verdict}


def verdict_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """Splits a verdict into the judgement, such as "agrees with the claim", and the reason.

    The reason starts with the scale of the runs, such as "At 16 pixels, 600 steps: ".
    """
    word, _, reason = record["verdict"].partition(": ")
    return VERDICTS[word], reason


def result_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the scale of a record's runs, and the first sentence of its verdict's reason."""
    scale, _, reason = verdict_of(record)[1].partition(": ")
    return scale.removeprefix("At "), re.split(r"(?<=\.)\s", reason)[0]


def path_of(record: Mapping[str, Any], folder: Path) -> Path:
    """Returns the file of a record: NAME.json (laptop scale) or NAME-paper.json (paper's scale)."""
    scale = "" if record["scale"] == "laptop" else f"-{record['scale']}"
    return folder / f"{record['experiment']}{scale}.json"


def write_record(record: Mapping[str, Any], folder: Path = RECORDS) -> Path:
    """Writes a record and returns its path.

    Raises:
      UserError: there is a record of this experiment with more runs, which would be replaced.
    """
    path = path_of(record, folder)
    if path.exists():
        before = json.loads(path.read_text())["runs"]["finished"]
        if before > record["runs"]["finished"]:
            raise UserError(
                f"{path} is of {before} runs, and these are {record['runs']['finished']}; remove "
                "it first"
            )
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path


def keep_pictures(record: Mapping[str, Any], study: Path, folder: Path = PICTURES) -> list[Path]:
    """Copies pictures NAME*.png at laptop scale to the docs, and returns the new paths."""
    name, copies = record["experiment"], []
    if record["scale"] != "laptop":
        return copies
    for picture in sorted([*study.glob(f"{name}.png"), *study.glob(f"{name}-*.png")]):
        folder.mkdir(parents=True, exist_ok=True)
        copies.append(Path(shutil.copyfile(picture, folder / picture.name)))
    return copies


def records(folder: Path = RECORDS) -> dict[str, dict[str, Any]]:
    """Reads all records, by file name without `.json`: NAME or NAME-paper."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def how_far(record: Mapping[str, Any]) -> str:
    """Returns a text with the number of finished runs in a record, the date and the commit."""
    runs = record["runs"]
    part = "recorded" if runs["finished"] >= runs["known"] else "partly recorded"
    count = f": {runs['finished']} of {runs['known']} runs" if runs["known"] else ""
    return f"{part}{count}, {record['date']}, commit {record['commit']}"
