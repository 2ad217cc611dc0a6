"""The runner of experiments: stages, output files, lists, records, and errors."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from vit_jax import command, experiment, published
from vit_jax.errors import UserError
from vit_jax.ledger import ledger_page, records, study
from vit_jax.ledger.progress_page import write_progress
from vit_jax.ledger.records import keep_pictures, make_record, with_verdict, write_record
from vit_jax.ledger.stages import at_best
from vit_jax.ledger.study import Experiment, Study, conduct
from vit_jax.ledger.tables import comparison_table, gains, pivot
from vit_jax.runs.jobs import Job, outcome

FILE = """
from vit_jax.ledger.stages import at_best
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing

def make(study, width, optimizer__learning_rate, seed):
    if width == "none":
        return None
    return "quickstart", dict(model__dim=width, optimizer__learning_rate=optimizer__learning_rate)

EXPERIMENT = Experiment(
    claim="Rates matter.",
    place="Table 1",
    stages=at_best("widths", {"width": (32, 64, "none")}, make, {"optimizer__learning_rate": (0.1, 0.2)},
                   {"data__test_split": "train[90%:]"}, seeds=(0, 3)),
    read=lambda study: study.points("widths", "accuracy"),
    table=lambda figures: listing(figures, ("width",)),
    options=dict(more=dict(type=int, default=0)),
)
"""


def finish(workdir: Path, accuracy: float, commit: str = "0123456789abcdef") -> None:
    """Writes the files of a finished run that studies read."""
    workdir.mkdir(parents=True)
    versions = {"python": "3.11.7", "jax": "0.10.2"}
    manifest = {
        "steps": 9,
        "commit": commit,
        "versions": versions,
        "devices": "1 x cpu",
        "cores": 2,
    }
    (workdir / "manifest.json").write_text(json.dumps(manifest))
    rows = [
        {"step": 3, "test/accuracy": accuracy + 0.05, "fewshot/a/5": 0.5},
        {"step": 9, "time/train": 2.0, "time/start": 1.0},
        {"step": 9, "test/accuracy": accuracy, "test/loss": 1.0, "fewshot/a/5": 0.4},
    ]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_that_stopped_early_is_finished(tmp_path):
    finish(tmp_path / "run", 0.7)
    metrics = tmp_path / "run" / "metrics.jsonl"
    begun, *_ = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(begun)
    assert outcome(Job(tmp_path / "run", ())).pending
    kept = {"step": 6, "test/accuracy": 0.8, "test/loss": 1.0, "kept/step": 3}
    metrics.write_text(begun + json.dumps(kept) + "\n")
    assert outcome(Job(tmp_path / "run", ())).figures == {
        "accuracy": 0.8,
        "loss": 1.0,
        "seconds": 0.0,
    }


@pytest.fixture
def runs(monkeypatch):
    """Replaces runs by made-up ones; returns the names of the started ones.

    Higher learning rates and wider models have higher accuracies.
    """
    made = []

    def run_jobs(jobs, log, after_each):
        for job in jobs:
            if not job.workdir.exists():
                made.append(job.name)
                numbers = [
                    float(number) for number in re.findall(r"[a-z](\d+(?:\.\d+)?)", job.name)
                ]
                finish(job.workdir, 0.3 + numbers[0] / 1000 + numbers[1])
                after_each()

    monkeypatch.setattr(study, "run_jobs", run_jobs)
    monkeypatch.setattr(study, "check_data", lambda trials, study: None)
    monkeypatch.setattr(records, "saved_run", lambda workdir: Saved(workdir))
    monkeypatch.setattr(command, "use_compilation_cache", lambda: None)
    return made


class Saved:
    """The manifest of a run."""

    def __init__(self, workdir):
        self.manifest = json.loads((workdir / "manifest.json").read_text())


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "widths.py"
    path.write_text(FILE)
    return str(path)


def test_a_later_stage_has_the_best_choice_of_an_earlier_one(file, runs, tmp_path):
    out = tmp_path / "out"
    experiment.main([file, f"--out={out}"])
    assert runs[:4] == [f"width{w}_rate{r}_seed0" for w in (32, 64) for r in (0.1, 0.2)]
    assert runs[4:] == [f"width{w}_rate0.2_seed{s}" for w in (32, 64) for s in (0, 3)]
    points = json.loads((out / "widths.json").read_text())
    assert [(point["width"], point["seeds"]) for point in points] == [(32, [0, 3]), (64, [0, 3])]
    assert points[0]["accuracy"] == pytest.approx([0.532, 0.532])
    assert (out / "widths.md").read_text().splitlines()[2] == "| 32 | 53.20 ± 0.00 |"


def test_the_same_command_again_runs_nothing(file, runs, tmp_path):
    for _ in range(2):
        experiment.main([file, f"--out={tmp_path / 'out'}"])
    assert len(runs) == 8


def test_progress_page_counts_the_runs(file, runs, tmp_path):
    experiment.main([file, f"--out={tmp_path / 'out'}"])
    page = (tmp_path / "out" / "progress.html").read_text()
    assert "8 of 8 runs" in page and "53.20%" in page and " left of the stage" not in page


def test_progress_page_contains_the_remaining_time(tmp_path, monkeypatch):
    jobs = [Job(tmp_path / name, ()) for name in "abcd"]
    here, said = Study(tmp_path, {}), []
    clock = iter((100.0, 130.0))

    def run_jobs(jobs, log, after_each):
        finish(jobs[0].workdir, 0.5)
        after_each()

    def shown():
        write_progress(tmp_path / "progress.html", "It.", here, [])
        said.append((tmp_path / "progress.html").read_text())

    monkeypatch.setattr(study, "run_jobs", run_jobs)
    monkeypatch.setattr(study.time, "monotonic", lambda: next(clock))
    here.run([study.Trial("only", {"seed": 0}, job) for job in jobs], shown)
    assert "1 of 4 runs that are known so far; about 1 min 30 s left of the stage" in said[0]


def test_folder_of_another_study_is_refused(file, runs, tmp_path):
    experiment.main([file, f"--out={tmp_path / 'out'}"])
    with pytest.raises(
        UserError, match=r"belongs to another study \(experiment widths, not quickstart"
    ):
        experiment.main(["quickstart", f"--out={tmp_path / 'out'}"])
    with pytest.raises(UserError, match=r"another study \(options .*'more': 0.*, not .*'more': 1"):
        experiment.main([file, f"--out={tmp_path / 'out'}", "--more=1"])


def test_folder_with_other_files_is_refused(file, runs, tmp_path):
    with pytest.raises(UserError, match="contains files but no study"):
        experiment.main([file, f"--out={tmp_path}"])


def test_plan_names_the_runs_that_are_known_and_makes_none(file, runs, tmp_path, capsys):
    experiment.main([file, f"--out={tmp_path / 'out'}", "--plan"])
    assert not runs and not (tmp_path / "out").exists()
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "--config.optimizer.learning_rate=0.1 " in lines[0]
    assert last.startswith("4 runs are known, of ")


def test_a_failed_run_does_not_stop_the_others_and_is_named(file, runs, tmp_path, monkeypatch):
    failing = tmp_path / "out" / "widths" / "width32_rate0.1_seed0"

    def run_jobs(jobs, log, after_each):
        for job in jobs:
            job.workdir.parent.mkdir(parents=True, exist_ok=True)
            if job.workdir == failing:
                job.failed.write_text("no memory\n")
            else:
                finish(job.workdir, 0.5)

    monkeypatch.setattr(study, "run_jobs", run_jobs)
    with pytest.raises(UserError, match="1 of 8 runs failed.*width32_rate0.1_seed0: no memory"):
        experiment.main([file, f"--out={tmp_path / 'out'}"])
    points = json.loads((tmp_path / "out" / "widths.json").read_text())
    assert [point["seeds"] for point in points] == [[3], [0, 3]]


def test_unknown_scale_is_one_line(file, tmp_path):
    with pytest.raises(UserError, match="no paper scale; give --scale=laptop"):
        experiment.main([file, f"--out={tmp_path / 'out'}", "--scale=paper"])


def test_missing_data_are_an_error_before_any_run(tmp_path):
    stages = (
        lambda study: [study_trial(study, data__source="folder", data__path="/nowhere/at/all")],
    )
    with pytest.raises(UserError, match="/nowhere/at/all"):
        conduct(
            "it", Experiment("It.", lambda study: {}, stages=stages), Study(tmp_path / "out", {})
        )


def study_trial(study_, **values):
    """Returns the only run of a study."""
    return study.Trial("only", {"seed": 0}, study_.job("only", **values))


# Facts about a run.


def test_figures_of_a_run_are_of_its_last_evaluation_and_its_history_of_all(tmp_path):
    finish(tmp_path / "run", 0.5)
    found = outcome(Job(tmp_path / "run", ()))
    assert found.figures == {"accuracy": 0.5, "loss": 1.0, "fewshot/a/5": 0.4, "seconds": 3.0}
    assert found.history["accuracy"] == [0.55, 0.5] and found.history["fewshot/a/5"] == [0.5, 0.4]


def test_line_that_another_process_is_writing_is_left_out(tmp_path):
    finish(tmp_path / "run", 0.5)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "test/accu')
    assert outcome(Job(tmp_path / "run", ())).figures["accuracy"] == 0.5


def test_best_figure_is_that_of_early_stopping(file, runs, tmp_path):
    made = Study(tmp_path / "out", {})
    conduct("widths", experiment.load(file), made)
    (point,) = made.points("widths", "best fewshot/a/5", "fewshot/a/5", width=32)
    assert point["best fewshot/a/5"] == [0.5, 0.5] and point["fewshot/a/5"] == [0.4, 0.4]


# Records.


@pytest.fixture
def recorded(file, runs, tmp_path):
    """Returns the record of all runs, and the folder of the runs."""
    experiment.main([file, f"--out={tmp_path / 'out'}"])
    record = make_record("widths", experiment.load(file), [tmp_path / "out"])
    return with_verdict(
        record, "agrees: At 4 steps: The wider is ahead.", tmp_path
    ), tmp_path / "out"


def test_record_describes_how_the_figures_were_made(recorded):
    record, _ = recorded
    assert record["commit"] == "0123456789" and record["machine"] == "1 x cpu, 2 cores"
    assert record["runs"] == {"finished": 8, "known": 8, "failed": 0}
    assert record["seconds"] == 24 and record["seeds"] == [0, 3]
    assert record["command"] == "python -m vit_jax.experiment widths --out=DIR"
    assert record["figures"][0]["width"] == 32 and record["versions"]["jax"] == "0.10.2"


def test_runs_after_a_failed_choice_are_recorded_too(recorded, file):
    record, out = recorded
    failed = out / "widths-choices" / "width32_rate0.1_seed0"
    (failed / "metrics.jsonl").unlink()
    failed.with_name(f"{failed.name}.failed").write_text("no memory\n")
    again = make_record("widths", experiment.load(file), [out])
    assert again["runs"] == {"finished": 7, "known": 8, "failed": 1}
    assert again["figures"] == record["figures"]


def test_partial_record_is_marked_and_does_not_replace_a_larger_one(recorded, file, tmp_path):
    record, out = recorded
    (out / "widths" / "width64_rate0.2_seed3" / "metrics.jsonl").unlink()
    part = make_record("widths", experiment.load(file), [out])
    assert records.how_far(part).startswith("partly recorded: 7 of 8 runs, ")
    write_record(record, tmp_path / "records")
    with pytest.raises(UserError, match="is of 8 runs, and these are 7"):
        write_record(part, tmp_path / "records")


def test_record_is_made_of_runs_in_other_folders(recorded, file, tmp_path):
    record, out = recorded
    elsewhere = tmp_path / "pod" / "widths" / "width64_rate0.2_seed3"
    elsewhere.parent.mkdir(parents=True)
    (out / "widths" / "width64_rate0.2_seed3").rename(elsewhere)
    again = make_record("widths", experiment.load(file), [out, tmp_path / "pod"])
    assert again["runs"]["finished"] == 8 and again["figures"] == record["figures"]
    assert (
        make_record("widths", experiment.load(file), [out, elsewhere])["figures"]
        == record["figures"]
    )


def test_verdict_is_kept_with_its_figures_and_required_for_others(recorded, file, tmp_path):
    record, out = recorded
    write_record(record, tmp_path / "records")
    again = make_record("widths", experiment.load(file), [out])
    assert with_verdict(again, folder=tmp_path / "records") == record
    other = again | {"figures": []}
    verdict = "cannot tell: At no step: It has no runs."
    with pytest.raises(
        UserError, match=r'the differences: --verdict="WORD: At 16 pixels, .*" with agrees, '
    ):
        with_verdict(other, folder=tmp_path / "records")
    assert with_verdict(other, verdict)["verdict"] == verdict


@pytest.mark.parametrize(
    "verdict",
    [
        "It agrees.",
        "agrees",
        "contradicts: At 4 steps: ",
        "disagrees: At 4 steps: No.",
        "agrees: They do.",
    ],
)
def test_verdict_begins_with_its_word_and_scale_and_gives_a_reason(verdict, recorded, tmp_path):
    with pytest.raises(UserError, match="state whether these figures support the claim"):
        with_verdict(recorded[0], verdict, tmp_path)


def test_record_is_made_by_one_command_with_its_verdict(
    recorded, file, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(records.write_record, "__defaults__", (tmp_path / "records",))
    monkeypatch.setattr(records.keep_pictures, "__defaults__", (tmp_path / "pictures",))
    experiment.main(
        ["record", file, str(recorded[1]), "--verdict=contradicts: At 4 steps: They do."]
    )
    assert "recorded: 8 of 8 runs" in capsys.readouterr().out
    assert (
        records.records(tmp_path / "records")["widths"]["verdict"]
        == "contradicts: At 4 steps: They do."
    )


@pytest.mark.parametrize("commit", ["", "0123456789abcdef, changed"])
def test_record_of_an_unknown_commit_is_refused(recorded, file, commit):
    _, out = recorded
    manifest = out / "widths" / "width64_rate0.2_seed3" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"commit": commit}))
    with pytest.raises(UserError, match="the commit of run width64_rate0.2_seed3 is"):
        make_record("widths", experiment.load(file), [out])


def test_pages_have_the_tables_of_the_records(recorded, file):
    record, _ = recorded
    known, all_records = {"widths": experiment.load(file)}, {"widths": record}
    page = ledger_page.page(known, all_records)
    assert "## Table 1: widths" in page and "| 32 | 53.20 ± 0.00 |" in page
    row = "| Rates matter. | 4 steps | **agrees with the claim**: The wider is ahead. |"
    assert f"| [Table 1: widths](#table-1-widths) {row}" in page
    assert "\n**Agrees with the claim.** At 4 steps: The wider is ahead.\n" in page
    text = "# A page\n\n<!-- record widths -->\nold\n<!-- end of record -->\nmore\n"
    written = ledger_page.with_records(text, known, all_records)
    judged = ledger_page.with_records(
        text.replace("record widths", "verdict widths"), known, all_records
    )
    assert (
        "-->\n"
        "**Agrees with the claim.** At 4 steps: The wider is ahead.\n"
        "<!-- end of record -->\n"
        "more"
    ) in judged
    assert (
        "| 64 | 56.40 ± 0.00 |\n<!-- end of record -->\nmore" in written and "\nold" not in written
    )
    assert ledger_page.with_records(written, known, all_records) == written
    with pytest.raises(UserError, match="no record 'nothing'"):
        ledger_page.with_records(text.replace("widths", "nothing"), known, all_records)


def test_record_has_what_is_published_and_our_difference_or_why_there_is_none(
    recorded, file, tmp_path
):
    record, out = recorded
    assert record["difference"] == {} and record["published"].startswith("figures of other data")
    known = experiment.load(file)
    compared = dataclasses.replace(known, compared=lambda figures: {"gain": {"64": (2.0, 3.25)}})
    again = make_record("widths", compared, [out])
    assert again["published"] == {"gain": {"64": 2.0}} and again["difference"] == {
        "gain": {"64": 1.25}
    }
    block = ledger_page.block(compared, with_verdict(again, "agrees: At 4 steps: It does."))
    assert "\nOurs (and published): gain: 64 +3.2 (+2.0).\n" in block
    assert ", 2 seeds (cells without ± have one) on 1 x cpu" in block


@pytest.mark.parametrize("name, row", [("table1", "Params, million"), ("table6", "exaFLOPs")])
def test_tables_of_the_same_rows_have_a_difference_in_every_cell(name, row):
    record = records.records()[name]
    assert (
        record["difference"][row].keys()
        == record["figures"][row].keys()
        == record["published"][row].keys()
    )
    for column, apart in record["difference"][row].items():
        ours, paper = record["figures"][row][column], record["published"][row][column]
        assert ours == pytest.approx(paper + apart, abs=1e-5)


def test_gains_are_points_over_a_base_of_what_both_have():
    paper, ours = {"none": 61.0, "1d": 64.0, "3d": 1.0}, {"none": 72.5, "1d": 74.5, "2d": 75.0}
    assert gains(paper, ours, "none") == {"points over none": {"1d": (3.0, 2.0)}}
    assert gains(paper, {"1d": 74.5}, "none") == {"points over none": {}}


def test_record_without_runs_has_versions_and_the_time_that_was_spent(tmp_path, monkeypatch):
    clock = iter((10.0, 52.0, 60.0, 60.0))
    monkeypatch.setattr(study.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(records, "commit_of_package", lambda: "0123456789abcdef")
    it = Experiment(
        "It.", lambda study: {"Layers": {"ViT-B": 12}}, place="Table 1", published="table1"
    )
    conduct("it", it, Study(tmp_path, {}, lambda line: None))
    record = make_record("it", it, [tmp_path])
    assert record["seconds"] == 42 and {"python", "jax", "numpy"} <= record["versions"].keys()
    assert record["published"] == {"Layers": {"ViT-B": 12}} and record["difference"] == {
        "Layers": {"ViT-B": 0}
    }


# Experiments and records of this project.


def test_minutes_of_an_experiment_agree_with_its_record():
    for name, record in records.records().items():
        recorded, said = record["seconds"] / 60, experiment.load(record["experiment"]).minutes
        if (
            record["runs"]["known"] and record["scale"] == "laptop"
        ):  # Two runs are made at once, each on one core.
            assert 0.45 * recorded <= said <= 1.2 * recorded, (
                f"{name}: {said} min instead of the {recorded:.1f} min of its runs"
            )


def test_the_projects_pages_agree_with_its_records():
    known = {name: experiment.load(name) for name in experiment.names()}
    assert ledger_page.PAGE.read_text() == ledger_page.page(known, records.records())
    for path in [ledger_page.ROOT / "README.md", *(ledger_page.ROOT / "docs").glob("*.md")]:
        text = path.read_text()
        assert ledger_page.with_records(text, known, records.records()) == text, path


def test_the_overview_has_links_scales_and_results_with_our_own_experiments_apart():
    known = {name: experiment.load(name) for name in ("followups", "figure3", "table1")}
    overview, _, _ = ledger_page.page(known, records.records()).partition("\n## ")
    paper, _, own = overview.partition("**Follow-ups and methods**")
    assert "| [Figure 3: figure3](#figure-3-figure3) | " in paper
    assert (
        "| 16 pixels, 1,200 steps, up to 100,000 images | **not seen at this scale**: The BiTs "
        "lead "
    ) in paper
    assert "by 21 to 32 points" in paper
    assert "followups" in own and "followups" not in paper and "figure3" not in own


def test_every_experiment_is_listed_with_its_claim_in_the_ledgers_order(capsys):
    experiment.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split(" (")[0] for line in lines if not line.startswith(" ")][:-1]
    assert sorted(listed) == experiment.names()
    assert "quickstart (our own): The quickstart reads handwritten digits." in lines
    (place,) = [number for number, line in enumerate(lines) if line.startswith("figure3 (")]
    paragraph = "\n".join(lines[place + 1 :]).partition("\nfigure4 (")[0]
    assert (
        "\n      not seen at this scale: At 16 pixels, 1,200 steps, up to 100,000 images: "
        in paragraph
    )
    assert any(line.endswith("; needs jft, imagenet21k, vtab/TASK (19 tasks)") for line in lines)
    places = [re.search(r"\((.*?)\)", line)[1].split()[0] for line in lines[:-1] if line[0] != " "]
    assert places == sorted(places, key=["Table", "Figure", "Section", "Appendix", "our"].index)


def test_every_experiment_has_at_most_80_lines_or_is_listed_as_long():
    long = {
        "dense_digits",
        "elpv",
        "finetune_folders",
        "imbalance",
        "plan_growth",
        "plan_tables",
        "pretrain_photos",
        "real_weights",
        "self_supervised",
        "self_supervised_digits",
        "transfer_digits",
    }
    for name in experiment.names():
        lines = len((experiment.EXPERIMENTS / f"{name}.py").read_text().splitlines())
        assert (lines <= 80) != (name in long), f"{name}: {lines} lines"


# Tables.


def test_comparison_table_has_published_and_own_figures():
    text = comparison_table(
        published.table("table6"), {"exaFLOPs": {"ViT-L/16, JFT-300M, 14 epochs": 1570.25}}
    )
    assert text.splitlines() == [
        "|  | exaFLOPs, paper | exaFLOPs, ours |",
        "| --- | --- | --- |",
        "| ViT-L/16, JFT-300M, 14 epochs | 1,567 | 1,570.2 |",
    ]


def test_pivot_has_a_cell_for_each_pair_and_none_for_what_was_not_run():
    points = [
        {"model": "a", "images": 1000, "accuracy": [0.5, 0.7]},
        {"model": "b", "images": 20000, "accuracy": [0.25]},
    ]
    deviation = 100 * math.sqrt(0.02)
    assert pivot(points, "model", "images").splitlines() == [
        "| accuracy, % | images 1,000 | images 20,000 |",
        "| --- | --- | --- |",
        f"| a | 60.00 ± {deviation:.2f} |  |",
        "| b |  | 25.00 |",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the name of an experiment and --out=DIR, or --list"),
        (["tranfer_digits"], "no experiment 'tranfer_digits'; did you mean 'transfer_digits'"),
        (["nowhere.py"], "no experiment 'nowhere.py'"),
        (["record", "quickstart"], "give the name of an experiment and the folders"),
        (["record", "quickstart", "/nowhere/at/all"], "there is no folder /nowhere/at/all"),
    ],
)
def test_mistake_is_one_line(arguments, message):
    with pytest.raises(UserError, match=message):
        experiment.main(arguments)


def test_steps_below_one_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        experiment.main(["quickstart", "--out=out", "--steps=0"])
    assert ended.value.code == 2 and "--steps: invalid steps value: '0'" in capsys.readouterr().err


def test_file_without_an_experiment_is_named(tmp_path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(UserError, match="empty.py defines no EXPERIMENT"):
        experiment.load(str(tmp_path / "empty.py"))


def test_a_choice_is_made_once_for_those_that_are_alike(tmp_path):
    def make(study, model, size, rate, seed):
        return "quickstart", {"model__dim": size, "optimizer__learning_rate": rate}

    factors = {"model": ("a", "b"), "size": (32, 64)}
    compare, conduct = at_best(
        "widths",
        factors,
        make,
        {"rate": (0.1, 0.2)},
        {},
        seeds=(0,),
        alike=lambda cell: cell | {"size": 32},
    )
    study = Study(tmp_path, {})
    study.trials += compare(study)
    assert [(trial.factors["model"], trial.factors["size"]) for trial in study.trials] == [
        ("a", 32),
        ("a", 32),
        ("b", 32),
        ("b", 32),
    ]
    for trial, accuracy in zip(study.trials, (0.4, 0.5, 0.7, 0.6), strict=True):
        finish(trial.job.workdir, accuracy)
    chosen = {(t.factors["model"], t.factors["size"]): t.factors["rate"] for t in conduct(study)}
    assert chosen == {("a", 32): 0.2, ("a", 64): 0.2, ("b", 32): 0.1, ("b", 64): 0.1}


def test_pictures_of_a_record_are_kept_and_no_other_experiments(tmp_path):
    for name in ("figure1.png", "figure1-left.png", "figure10.png", "figure1.md"):
        (tmp_path / name).write_text(name)
    record = {"experiment": "figure1", "scale": "laptop"}
    kept = keep_pictures(record, tmp_path, tmp_path / "kept")
    assert [file.name for file in kept] == ["figure1-left.png", "figure1.png"]
    assert [file.read_text() for file in kept] == ["figure1-left.png", "figure1.png"]
    assert keep_pictures(record | {"scale": "paper"}, tmp_path, tmp_path / "none") == []


def test_only_the_record_of_laptop_scale_has_pictures(recorded, file, tmp_path, monkeypatch):
    record, _ = recorded
    (tmp_path / "widths.png").touch()
    for name in ("ROOT", "PICTURES"):
        monkeypatch.setattr(ledger_page, name, tmp_path)
    both = dataclasses.replace(experiment.load(file), paper=experiment.load(file))
    assert "![ours: Table 1, agrees with the claim](widths.png)" in ledger_page.block(both, record)
    assert "(widths.png)" not in ledger_page.block(both, record | {"scale": "paper"})
