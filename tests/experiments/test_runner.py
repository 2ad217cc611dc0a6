"""What runs an experiment: its stages, what it writes, what it lists, and mistakes."""

import json

import pytest

from vit_jax import command, experiment, published
from vit_jax.errors import UserError
from vit_jax.runs import study
from vit_jax.runs.jobs import Outcome
from vit_jax.runs.study import Experiment, Study, beside, conduct

FILE = """
from vit_jax.runs.study import Experiment, best, markdown_table

def rates(study):
    return {("rate", rate): study.job(f"rate-{rate}", optimizer__learning_rate=rate) for rate in (0.1, 0.2)}

def final(study):
    rate = best(study.accuracies("rate"))
    return {("seed", seed): study.job(f"{rate}-seed{seed}", seed=seed) for seed in study.options["seeds"]}

EXPERIMENT = Experiment(
    claim="Rates matter.",
    stages=(rates, final),
    read=lambda study: study.accuracies("seed"),
    table=lambda figures: markdown_table(("seed", "accuracy"), list(figures.items())),
    options=dict(seeds=dict(type=int, nargs="+", default=[0])),
)
"""


@pytest.fixture
def runs(monkeypatch):
    """Names of the runs that were made, whose accuracy is in their names."""
    made = []

    def run_jobs(jobs, say):
        made.extend(job.name for job in jobs if job.name not in made)

    def outcome(job):
        accuracy = 0.9 if "0.2" in job.name else 0.5
        return Outcome({"accuracy": accuracy} if job.name in made else None)

    monkeypatch.setattr(study, "run_jobs", run_jobs)
    monkeypatch.setattr(study, "outcome", outcome)
    monkeypatch.setattr(command, "use_compilation_cache", lambda: None)
    return made


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "table.py"
    path.write_text(FILE)
    return str(path)


def test_a_later_stage_sees_what_an_earlier_one_found(file, runs, tmp_path):
    experiment.main([file, f"--out={tmp_path / 'out'}", "--seeds", "0", "3"])
    assert runs == ["rate-0.1", "rate-0.2", "0.2-seed0", "0.2-seed3"]
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == {"0": 0.9, "3": 0.9}
    assert (tmp_path / "out" / "results.md").read_text().splitlines()[2] == "| 0 | 0.9 |"


def test_plan_names_the_runs_that_are_known_and_makes_none(file, runs, tmp_path, capsys):
    experiment.main([file, f"--out={tmp_path / 'out'}", "--plan"])
    assert not runs and not (tmp_path / "out").exists()
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "quickstart.py --config.optimizer.learning_rate=0.1 --workdir=" in lines[0]
    assert last.startswith("2 runs are known, of ")


def test_failed_run_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "run_jobs", lambda jobs, say: None)
    monkeypatch.setattr(study, "outcome", lambda job: Outcome(failure="no memory"))
    stages = (lambda study: {0: study.job("only")},)
    with pytest.raises(UserError, match="only: no memory"):
        conduct(Experiment("It runs.", read=lambda study: {}, stages=stages), Study(tmp_path, {}))


def test_figures_stand_beside_the_published():
    text = beside(published.table("table6"), {"exaFLOPs": {"ViT-L/16, JFT-300M, 14 epochs": 1570.25}})
    assert text.splitlines() == [
        "|  | exaFLOPs, paper | exaFLOPs, ours |",
        "| --- | --- | --- |",
        "| ViT-L/16, JFT-300M, 14 epochs | 1,567 | 1,570.2 |",
    ]


def test_every_experiment_is_listed_with_its_claim(capsys):
    experiment.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == experiment.names()
    assert "quickstart: The quickstart reads handwritten digits." in lines[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the name of an experiment and --out=DIR, or --list"),
        (["tranfer_digits"], "no experiment 'tranfer_digits'; did you mean 'transfer_digits'"),
        (["nowhere.py"], "no experiment 'nowhere.py'"),
    ],
)
def test_mistake_is_one_line(arguments, message):
    with pytest.raises(UserError, match=message):
        experiment.main(arguments)


def test_file_without_an_experiment_is_named(tmp_path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(UserError, match="empty.py makes no EXPERIMENT"):
        experiment.load(str(tmp_path / "empty.py"))
