"""Runs of an experiment with other data sets than those of the experiment."""

from pathlib import Path

import pytest

from vit_jax import experiment
from vit_jax.errors import UserError
from vit_jax.ledger import study
from vit_jax.ledger.other_data import read_data
from vit_jax.ledger.study import Study, config_of
from vit_jax.runs.jobs import Outcome


def config_with(*data: str, config: str = "vit_b16_i1k", **values):
    """Returns the config of a run in which some data sets are replaced."""
    return config_of(Study(Path("nowhere"), {"data": data}).job("run", config, **values))


def test_other_data_keep_the_slices_of_splits():
    config = config_with("imagenet2012=folder:/data/mine@all,val")
    assert (config.data.source, config.data.path) == ("folder", "/data/mine")
    assert (config.data.train_split, config.data.dev_split) == ("all[:99%]", "all[99%:]")
    assert config.data.test_split == "val"


def test_other_data_without_splits_have_those_of_the_same_names_and_their_own_classes():
    config = config_with("jft=tfds:/data/mine", config="vit_b16_jft")
    assert (config.data.train_split, config.data.test_split) == ("train", "validation")
    assert (config.data.label_key, config.data.num_classes) == ("label", None)
    config = config_with(
        "jft=array_record:/data/*,label_key=class,num_classes=9", config="vit_b16_jft"
    )
    assert (config.data.label_key, config.data.num_classes) == ("class", 9)


def test_data_that_are_evaluated_few_shot_are_replaced_and_called_as_before(monkeypatch, tmp_path):
    sets = ("tfds:imagenet2012@train[:900],validation", "tfds:cifar10")
    data = ["imagenet2012=folder:/data/mine@train,val"]
    config = config_with(*data, config="vit_b16_jft", fewshot__sets=sets, fewshot__every=5000)
    assert config.data.path == "jft"
    assert tuple(config.fewshot.sets) == ("folder:/data/mine@train[:900],val", "tfds:cifar10")
    found = Outcome({"fewshot/mine/5": 0.5}, history={"fewshot/mine/5": [0.75, 0.5]})
    monkeypatch.setattr(study, "outcome", lambda job: found)
    here = Study(tmp_path, {"data": data})
    trial = study.Trial("only", {}, here.job("run"))
    assert here.figure(trial, "fewshot/imagenet2012/5") == 0.5
    assert here.figure(trial, "best fewshot/imagenet2012/5") == 0.75


@pytest.mark.parametrize(
    "text",
    [
        "jft",
        "jft=",
        "jft=nothing:/data",
        "jft=synthetic:/data",
        "jft=folder:/a@train",
        "jft=folder:",
    ],
)
def test_data_that_cannot_be_read_are_one_line(text):
    with pytest.raises(UserError, match="write NAME=KIND:PATH@TRAIN,TEST, such as"):
        read_data([text])


def test_two_data_sets_in_one_place_are_refused():
    with pytest.raises(UserError, match="has jft twice"):
        read_data(["jft=folder:/a", "jft=folder:/b"])


def at_scale(tmp_path, *flags: str) -> None:
    """Runs an experiment that pre-trains on JFT-300M and fine-tunes on ImageNet."""
    experiment.main(["objectnet", "--scale=paper", f"--out={tmp_path / 'out'}", *flags])


def test_data_that_no_run_reads_are_refused_and_those_that_are_read_named(tmp_path):
    with pytest.raises(UserError, match="no run reads 'jtf'; they read jft, imagenet2012$"):
        at_scale(tmp_path, "--data=jtf=folder:/data", "--plan")


def test_error_of_missing_data_describes_the_data_and_the_flag_for_others(tmp_path):
    with pytest.raises(UserError, match=r"JFT-300M was never published.*: --data=jft=KIND:PATH$"):
        at_scale(tmp_path)
    # The failed study has not claimed the output folder.
    with pytest.raises(UserError, match="no folder /nowhere/train"):
        at_scale(tmp_path, "--data=jft=folder:/nowhere")


def test_missing_data_of_a_later_stage_are_an_error_before_the_first(monkeypatch, tmp_path):
    def open_all(config, replaced):
        if config.data.path == "imagenet2012":
            raise UserError("no ImageNet")

    monkeypatch.setattr(study, "open_all", open_all)
    with pytest.raises(UserError, match="no ImageNet"):
        at_scale(tmp_path)


def test_studies_with_other_data_do_not_share_a_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(study, "open_all", lambda config, replaced: None)
    monkeypatch.setattr(study, "run_jobs", lambda jobs, log, shown: None)
    monkeypatch.setattr(experiment.command, "use_compilation_cache", lambda: None)
    at_scale(tmp_path, "--data=jft=folder:/a", "--data=imagenet2012=folder:/b")
    at_scale(tmp_path, "--data", "imagenet2012=folder:/b", "jft=folder:/a")  # The same data sets.
    with pytest.raises(UserError, match="another study"):
        at_scale(tmp_path, "--data=jft=folder:/other", "--data=imagenet2012=folder:/b")
