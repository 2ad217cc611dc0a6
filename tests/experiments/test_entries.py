"""The ledger's experiments, from their stages to their finding, and parts that they share."""

from pathlib import Path

import pytest

from vit_jax import experiment
from vit_jax.errors import UserError
from vit_jax.ledger import prices, study
from vit_jax.ledger.stages import fine_tuning
from vit_jax.ledger.study import Study, conduct
from vit_jax.ledger.tables import agreement, differences, listing, means, ranking
from vit_jax.ledger.unlabelled import CONVNEXT_V2, MODEL, OTHERS, few_labels
from vit_jax.models import abstract, count_multiply_adds, model_factory
from vit_jax.runs.jobs import Outcome

ENTRIES = (
    "deit",
    "figure2",
    "figure3_million",
    "figure4",
    "figure9",
    "figure13",
    "followups",
    "grid",
    "masked_patch",
    "table2",
    "table5",
    "table7",
    "table9",
)


@pytest.fixture
def made_up(monkeypatch):
    """Replaces runs by made-up ones that finish immediately; returns the list of their workdirs.

    The metric of a run is its index in this list divided by 1000.
    """
    made = []

    def figure(self, trial, name):
        return (made.index(trial.job.workdir) + 1) / 1000

    def run_jobs(jobs, log, after_each):
        made.extend(job.workdir for job in jobs if job.workdir not in made)
        after_each()

    def outcome(job):
        return (
            Outcome({"accuracy": made.index(job.workdir) / 1000})
            if job.workdir in made
            else Outcome()
        )

    monkeypatch.setattr(study, "run_jobs", run_jobs)
    monkeypatch.setattr(study, "outcome", outcome)
    monkeypatch.setattr(study, "check_data", lambda trials, study: None)
    monkeypatch.setattr(Study, "figure", figure)
    return made


def conducted(name: str, scale: str, out: Path) -> str:
    """Runs an experiment and returns the page that it writes."""
    found = experiment.load(name)
    options = {option: values.get("default") for option, values in found.options.items()}
    conduct(name, found, Study(out, options, lambda line: None, scale))
    return (out / f"{name}.md").read_text()


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_goes_from_its_stages_to_a_table_and_a_finding(name, made_up, tmp_path):
    text = conducted(name, "laptop", tmp_path / "out")
    assert made_up and text.startswith("| ")
    assert text.rstrip().splitlines()[-1].endswith(".")  # The finding.


@pytest.mark.parametrize(
    "name",
    [
        *sorted({*ENTRIES} - {"deit", "figure3_million", "followups"}),
        "figure3",
        "figure5",
        "objectnet",
    ],
)
def test_entry_at_the_papers_scale_makes_its_table(name, made_up, tmp_path):
    rows = [
        line
        for line in conducted(name, "paper", tmp_path / "out").splitlines()
        if line.startswith("| ")
    ]
    assert made_up and len(rows) > 2


@pytest.mark.parametrize(
    "name, finding",
    [
        ("table1", "Params, million of ViT-B: 86.57, not 86."),
        ("table3", "All 198 values are the paper's."),
        ("table4", "All 54 values are the paper's."),
    ],
)
def test_values_are_compared_with_the_papers(name, finding, tmp_path):
    assert conducted(name, "laptop", tmp_path / "out").rstrip().endswith(finding)


def test_figure_1_has_every_parameter_of_the_layer_that_it_shows():
    figures = experiment.load("figure1").read(None)
    assert figures["tokens"] == 197 and figures["layers"] == 12
    assert all(figures["parts"].values())
    shapes = {path: shape for part in figures["parts"].values() for path, shape in part.items()}
    assert shapes["head/kernel"] == [768, 1000] and shapes["blocks/00/mlp/fc1/kernel"] == [
        768,
        3072,
    ]
    assert len(shapes) == 2 + 1 + 1 + 12 + 2 + 4


def test_small_batches_reads_metrics_of_dino(made_up, monkeypatch, tmp_path):
    asked = set()
    monkeypatch.setattr(Study, "figure", lambda self, trial, name: asked.add(name) or len(asked))
    conducted("small_batches", "laptop", tmp_path / "out")
    assert asked == {
        "knn/digits/10",
        "prototypes_used",
    }  # These metrics are logged by runs of configs/dino_digits.py.


def test_objectnet_has_no_laptop_scale(tmp_path):
    with pytest.raises(UserError, match="no laptop scale; give --scale=paper"):
        conducted("objectnet", "laptop", tmp_path / "out")


# Parts that several experiments share.


def test_fine_tuning_waits_for_pre_training_and_random_parameters_do_not(made_up, tmp_path):
    pretrained, choices, _ = few_labels(
        {"none": None, "some": {"steps": 7}}, steps=50, tuning_steps=9
    )
    here = Study(tmp_path, {})
    assert [trial.factors["start"] for trial in choices(here)] == ["none", "none"]
    here.run(pretrained(here), lambda: None)
    assert [trial.factors["start"] for trial in choices(here)] == ["none", "none", "some", "some"]
    assert "images=20000,size=16,steps=7" in here.trials[0].job.flags[0]
    assert any("finetune.checkpoint" in flag for flag in choices(here)[-1].job.flags)


def test_start_with_a_teacher_waits_for_the_run_that_it_names(made_up, tmp_path):
    starts = {"pupil": {"objective__name": "eva", "objective__teacher": "master"}, "master": {}}
    first, second, *_ = few_labels(starts, steps=50, tuning_steps=9)
    here = Study(tmp_path, {})
    assert second(here) == []
    here.run(first(here), lambda: None)
    pupils = second(here)
    assert [(trial.factors["start"], trial.factors["seed"]) for trial in here.trials] == [
        ("master", seed) for seed in (0, 1, 2)
    ]
    for master, pupil in zip(here.trials, pupils, strict=True):
        assert pupil.factors["seed"] == master.factors["seed"]
        assert f"--config.objective.teacher={master.job.workdir}" in pupil.job.flags


def test_fine_tuning_goes_on_from_the_pre_training_of_its_seed(made_up, tmp_path):
    *stages, tuned = few_labels({"some": {}}, steps=50, tuning_steps=9, seeds=(0, 1))
    here = Study(tmp_path, {})
    for stage in stages:
        here.run(stage(here), lambda: None)
    started = {trial.factors["seed"]: trial.job.workdir for trial in here.finished("pretrained")}
    flags = {trial.factors["seed"]: trial.job.flags for trial in tuned(here)}
    assert len({*started.values()}) == len(flags) == 2
    assert all(f"--config.finetune.checkpoint={started[seed]}" in flags[seed] for seed in flags)


def test_teachers_are_trained_in_turn_and_those_that_only_teach_are_not_fine_tuned(
    made_up, tmp_path
):
    starts = {
        "pupil": {"objective__teacher": "tokeniser"},
        "tokeniser": {"objective__teacher": "master"},
        "master": {},
    }
    *turns, choices, _ = few_labels(
        starts, steps=50, tuning_steps=9, seeds=(0,), only_teach=("tokeniser",)
    )
    here = Study(tmp_path, {})
    for turn in turns:
        here.run(turn(here), lambda: None)
    assert [trial.factors["start"] for trial in here.trials] == ["master", "tokeniser", "pupil"]
    assert {trial.factors["start"] for trial in choices(here)} == {"pupil", "master"}


def test_start_of_no_steps_is_fine_tuned_from_random_parameters_of_its_model(made_up, tmp_path):
    starts = {"random": {"steps": 0, "model__name": "Swin-T"}}
    choices, _ = few_labels(starts, steps=50, tuning_steps=9)
    for trial in choices(Study(tmp_path, {})):
        assert "--config.model.name=Swin-T" in trial.job.flags
        assert not any("finetune" in flag or "steps=0" in flag for flag in trial.job.flags)


def test_fine_tuning_has_the_model_of_its_start_and_none_of_its_other_values(made_up, tmp_path):
    here, start = Study(tmp_path, {}), {"model__name": "Swin-T", "optimizer__weight_decay": 0.5}
    pretrained, choices, _ = few_labels({"Swin": start}, steps=50, tuning_steps=9)
    here.run(pretrained(here), lambda: None)
    for trial, decays in ((here.trials[0], True), (choices(here)[0], False)):
        assert "--config.model.name=Swin-T" in trial.job.flags
        assert ("--config.optimizer.weight_decay=0.5" in trial.job.flags) == decays


@pytest.mark.parametrize("values", [*OTHERS.values(), CONVNEXT_V2], ids=[*OTHERS, "ConvNeXt V2"])
def test_model_of_another_family_has_the_small_vits_compute(values):
    def multiply_adds(**values):
        return count_multiply_adds(abstract(model_factory(**values, num_classes=10, image_size=16)))

    own = {key.removeprefix("model__"): value for key, value in values.items()}
    assert multiply_adds(**own) == pytest.approx(multiply_adds(name=MODEL), rel=0.1)


def test_only_imagenet_has_high_resolution(made_up, tmp_path):
    here = Study(tmp_path, {})
    here.run([study.Trial("pretrained", {"model": "a"}, here.job("a"))], lambda: None)
    stages = fine_tuning(
        {"a": ("vit_b16_jft",)}, ["imagenet2012", "cifar10"], high_resolution={"a": 512}
    )
    imagenet, cifar = stages[0](here)[0].job.flags, stages[2](here)[0].job.flags
    assert imagenet[0].endswith("dataset=imagenet2012,size=512") and cifar[0].endswith(
        "dataset=cifar10"
    )
    assert "--config.optimizer.average=0.9999" in imagenet
    assert not any("average" in flag for flag in cifar)


@pytest.mark.parametrize("suite", ["fewshot", "knn"])
def test_trial_of_a_few_steps_keeps_its_figures_of_frozen_features(suite, tmp_path):
    here = Study(tmp_path, {}, steps=4)
    assert f"--config.{suite}.every=4" in here.job("a", **{f"{suite}__every": 50}).flags
    assert f"--config.{suite}.every=0" in here.job("b").flags


def test_prices_are_of_the_runs_of_the_first_stage():
    assert [*prices.pretraining_jobs(experiment.load("objectnet"))] == ["vit_h14_jft"]
    assert [*prices.pretraining_jobs(experiment.load("figure9"))] == [
        "vit_b16_jft model.pooling=cls optimizer.learning_rate=0.0008",
        "vit_b16_jft model.pooling=gap optimizer.learning_rate=0.0008",
        "vit_b16_jft model.pooling=gap optimizer.learning_rate=0.0003",
    ]
    assert prices.pretraining_jobs(experiment.load("deit")) == {}


def test_runs_at_the_papers_scale_can_be_planned(capsys, tmp_path):
    experiment.main(["objectnet", "--plan", "--scale=paper", f"--out={tmp_path / 'out'}"])
    line, last = capsys.readouterr().out.splitlines()
    assert "vit_h14_jft.py" in line and last.startswith("1 runs are known, of 4.2")


def test_a_step_is_compiled_once_and_days_are_the_runs_compute_at_its_mfu(monkeypatch, tmp_path):
    asked = []

    class Plan:
        mfu = 0.5

    monkeypatch.setattr(prices, "first_that_fits", lambda *of: asked.append(of) or ("", Plan))
    (job,) = prices.pretraining_jobs(experiment.load("objectnet")).values()
    # 4,262 exaFLOPs are from table 6; a core of TPU v3 has 61.5 TFLOP/s.
    wanted = 4262e18 / (0.5 * 61.5e12) / 86_400
    for _ in range(2):
        assert prices.device_days(job, "v3", tmp_path) == pytest.approx(wanted, rel=2e-3)
    half = job._replace(flags=(*job.flags, "--config.epochs=7"))
    assert prices.device_days(half, "v3", tmp_path) == pytest.approx(wanted / 2, rel=2e-3)
    assert len(asked) == 1 and prices.device_days(job, "v5e", tmp_path) and len(asked) == 2
    dropout = job._replace(flags=(*job.flags, "--config.model.dropout=0.1"))
    assert prices.device_days(dropout, "v3", tmp_path) and len(asked) == 3


def test_values_that_are_not_the_papers_are_named():
    figures = {
        "a": {"paper": {"Rate": [0.1], "Epochs": [7, 14]}, "ours": {"Rate": 0.2, "Epochs": 14}},
        "b": {"paper": {"Rate": [0.3], "Epochs": [7]}, "ours": {"Rate": 0.3, "Epochs": 7}},
    }
    assert agreement(figures).splitlines()[2:] == [
        "| a | 0.1 (**0.2**) | 7 / 14 |",
        "| b | 0.3 | 7 |",
    ]
    assert differences(figures) == "Rate of a is 0.2, not 0.1."
    assert differences({"b": figures["b"]}) == "All 2 values are the paper's."


def test_means_are_ranked_and_figures_may_stand_among_the_factors():
    points = [
        {"model": "a", "optimizer__name": "sgd", "seconds": [2.0, 4.0], "accuracy": [0.5, 0.7]},
        {"model": "b", "optimizer__name": "adam", "seconds": [8.0], "accuracy": [0.75]},
    ]
    found = means(points, "model", "optimizer__name")
    assert found == pytest.approx({"a, sgd": 60.0, "b, adam": 75.0})
    assert ranking(found) == "b, adam: 75.0 %; a, sgd: 60.0 %"
    assert listing(points, ("optimizer__name", "seconds")).splitlines() == [
        "| name | seconds | accuracy, % |",
        "| --- | --- | --- |",
        "| sgd | 3 | 60.00 ± 14.14 |",
        "| adam | 8 | 75.00 |",
    ]


def test_rate_for_resnets_is_tried_for_them_alone(tmp_path, monkeypatch):
    study = Study(tmp_path, {}, scale="paper")
    monkeypatch.setattr(study, "workdir", lambda stage, **factors: tmp_path / factors["model"])
    models = {"vit": ("vit_b16_jft",), "bit": ("bit_r50x1_jft",), "hybrid": ("r50_vit_b16_jft",)}
    compare, _ = fine_tuning(models, ["imagenet2012"])
    trials = [trial for trial in compare(study) if trial.factors["recipe"] == "finetune"]
    tried = {(t.factors["model"], t.factors["optimizer__learning_rate"]) for t in trials}
    assert tried == {(m, r) for m in models for r in (0.003, 0.01, 0.03)} | {
        ("bit", 0.06),
        ("hybrid", 0.06),
    }


def test_bit_is_fine_tuned_by_its_own_rule_too_and_the_better_is_kept(made_up, tmp_path):
    here, models = (
        Study(tmp_path, {}, scale="paper"),
        {"vit": ("vit_l16_jft",), "bit": ("bit_r152x4_jft",)},
    )
    here.run(
        [study.Trial("pretrained", {"model": model}, here.job(model)) for model in models],
        lambda: None,
    )
    compare, conduct = fine_tuning(models, ["imagenet2012"], seeds=(0, 1))
    here.run(compare(here), lambda: None)
    by_rule = [trial for trial in here.trials if trial.factors.get("recipe") == "bit_hyperrule"]
    (flags,) = (trial.job.flags for trial in by_rule)
    assert flags[0].endswith(
        "bit_hyperrule.py:dataset=imagenet2012,model=BiT-R152x4"
    )  # The hyperrule uses 480 pixels for this model.
    assert "--config.data.test_split=train[99%:]" in flags
    # The run of the hyperrule is the last one, so its made-up metric is the highest.
    recipes = [(trial.factors["model"], trial.factors["recipe"]) for trial in conduct(here)]
    assert recipes == [("vit", "finetune")] * 2 + [("bit", "bit_hyperrule")] * 2


def test_task_with_one_rate_is_not_compared(made_up, tmp_path):
    here = Study(tmp_path, {}, scale="paper")
    here.run([study.Trial("pretrained", {"model": "vit"}, here.job("vit"))], lambda: None)
    compare, conduct = fine_tuning({"vit": ("vit_l16_jft",)}, ["vtab/dtd"], seeds=(0,))
    assert compare(here) == [] and conduct(here)[0].factors["optimizer__learning_rate"] == 0.01


PLANNED = {
    "figure3": ("bit_i1k.py:model=BiT-R50x1", "bit_i21k.py:model=BiT-R152x4", "bit_r152x4_jft.py"),
    "figure4": ("--config.model.name=ViT-b/32", "bit_r152x2_jft.py", "vit_l16_jft.py"),
    "figure5": ("bit_r200x3_jft.py --config.epochs=14.0", "r50_vit_l16_jft.py --config.epochs=7.0"),
    "table2": ("bit_r152x4_jft.py",),
    "table9": ("bit_r152x4_jft.py",),
    "grid": ("vit_b16_i1k.py", "--config.loss.label_smoothing=0.1"),
}


@pytest.mark.parametrize("name", PLANNED)
def test_plan_at_the_papers_scale_has_the_papers_models(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        experiment, "show_plan", lambda trials: print(*(" ".join(t.job.flags) for t in trials))
    )
    experiment.main([name, "--plan", "--scale=paper", f"--out={tmp_path / 'out'}"])
    text = capsys.readouterr().out
    assert [run for run in PLANNED[name] if run not in text] == []


def test_subsets_are_learnt_for_the_steps_of_the_whole():
    found = prices.pretraining_jobs(experiment.load("figure4"))
    assert len(found) == 24
    assert [name for name in found if name.startswith("vit_b32_jft data")] == [
        f"vit_b32_jft data.train_split=train[:{images}] steps=517822"
        for images in (9_000_000, 30_000_000, 90_000_000, 303_000_000)
    ]


# These experiments read checkpoints or packages of the user, and are tested separately.
OF_FILES = {"detect_photos", "elpv", "finetune_folders", "pretrain_photos", "segment_photos"}


@pytest.mark.parametrize("name", sorted({*experiment.names()} - OF_FILES))
def test_values_of_an_experiments_runs_are_valid(name, check_runs):
    check_runs(name)
