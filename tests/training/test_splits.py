"""Tests of a run's splits: one for training, one for model selection and one for reporting."""

import re

import pytest

from tests.data.test_slices import make_folder
from vit_jax.config import base_config
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.runs.run_summary import unused
from vit_jax.runs.splits import notes, open_splits, share
from vit_jax.training.objectives import handing_in
from vit_jax.training.objectives.objective import Objective


def config_of(**values):
    config = base_config()
    config.update_from_flattened_dict({f"data.{key}": value for key, value in values.items()})
    return config


def test_splits_are_those_of_the_config_and_share_the_numbers_of_classes(tmp_path):
    make_folder(tmp_path / "train", {"ant": 10, "cat": 30})
    make_folder(tmp_path / "test", {"cat": 5})
    names = dict(train_split="train[:90%]", dev_split="train[90%:]")
    splits = open_splits(config_of(source="folder", path=str(tmp_path), **names))
    assert {name: len(source) for name, source in splits.named.items()} == dict(
        train=36, dev=4, test=5
    )
    assert splits.chosen_by == "dev"
    assert {source.class_names for source in splits.named.values()} == {("ant", "cat")}
    assert notes(base_config(), splits) == ["note: no test images of ant"]


def test_splits_of_chosen_classes_may_not_overlap(tmp_path):
    make_folder(tmp_path / "train", {"ant": 10, "bee": 10, "cat": 10})
    make_folder(tmp_path / "test", {"ant": 2, "cat": 2})
    splits = dict(train_split="train[:25]", dev_split="train[80%:]", classes=("ant", "cat"))
    with pytest.raises(UserError, match=r"data.train_split has images of it: 'train\[:25\]'"):
        open_splits(config_of(source="folder", path=str(tmp_path), **splits))


class Endless(Source):
    """A source with more images than a list of their indices could have."""

    def __len__(self):
        return 10**15


def test_splits_of_any_number_of_images_are_compared():
    config = config_of(source="folder", path="photos", dev_split="train[80%:]")
    assert share(config, Endless(), "train_split", "dev_split")
    assert not share(config, Endless(), "train_split", "test_split")


def notes_on_list(folder, names, loss, objective="classification") -> str:
    """Returns the notes on a CSV with the labels `names` of four images."""
    make_folder(folder, {"x": 4})
    files = sorted(path.relative_to(folder) for path in folder.rglob("x/*"))
    rows = [f"{file},{name}\n" for file, name in zip(files, names, strict=True)]
    (folder / "list.csv").write_text("".join(rows), encoding="utf-8")
    splits = dict(train_split="all", dev_split=None, test_split="all")
    config = config_of(source="csv", path=str(folder / "list.csv"), **splits)
    config.loss.name, config.objective.name = loss, objective
    return "\n".join(notes(config, open_splits(config)))


def test_similar_class_names_and_contradictory_labels_are_noted(tmp_path):
    acute = "caf\N{LATIN SMALL LETTER E WITH ACUTE}", "cafe\N{COMBINING ACUTE ACCENT}"
    for loss in ("softmax", "binary"):
        lines = notes_on_list(tmp_path / loss, [f"{acute[0]},dog", acute[1], "Dog", "dog"], loss)
        assert "similar names: 'Dog' and 'dog', 'cafe\\u0301' and 'caf\\xe9'" in lines
        several = "1 of 4 training images have several labels.*give --config.loss.name=sigmoid"
        assert bool(re.search(several, lines)) == (loss == "softmax")


class Ranking(Objective):
    """An objective of a program, with labels but without an accuracy."""

    labels = True


def test_labels_are_not_noted_for_an_objective_without_an_accuracy(tmp_path):
    with handing_in(Ranking):
        lines = notes_on_list(tmp_path, ["cat,dog", "dog", "dog", "cat"], "softmax", "Ranking")
    assert "several labels" not in lines


def test_numbers_that_differ_in_the_sign_are_not_similar_names(tmp_path):
    assert "similar" not in notes_on_list(tmp_path, ["1", "-1", "1", "-1"], "softmax")


def test_images_without_a_label_are_noted(tmp_path):
    lines = notes_on_list(tmp_path, ["cat", "dog", "", "dog"], "binary")
    assert re.search("1 of 4 test images have no label: .* accuracy is at most 75.00%", lines)


def test_files_that_no_split_uses_are_counted_by_reason(tmp_path):
    for split in ("train", "test"):
        make_folder(tmp_path / split, {"ant": 4, "cat": 4})
        (tmp_path / split / "cat" / "notes.txt").write_text("")
    (tmp_path / "test" / "ant" / "clip.mp4").write_text("")
    names = dict(train_split="train[:50%]", dev_split="train[50%:]")
    splits = open_splits(config_of(source="folder", path=str(tmp_path), **names))
    assert unused(splits) == ["training and dev: 1 .txt files", "test: 1 .mp4 files, 1 .txt files"]


def test_without_a_dev_split_models_are_selected_on_test_images():
    splits = open_splits(config_of())
    assert (list(splits.named), splits.chosen_by) == (["train", "test"], "test")


@pytest.mark.parametrize(
    ("train", "dev", "test", "named"),
    [
        ("train", "train[99%:]", "test", "data.train_split has images of it: 'train'"),
        ("train[:95%]", "train[90%:]", "test", "data.train_split"),
        ("train[:1000]", "train[69%:]", "test", "data.train_split"),  # The split has 1437 images.
        ("train[:90%][:90%]", "train[80%:][:50%]", "test", "data.train_split"),
        ("train", "test[:50%]", "test", "data.test_split has images of it: 'test'"),
    ],
)
def test_a_dev_split_with_training_or_test_images_is_refused(train, dev, test, named):
    with pytest.raises(UserError, match=re.escape(named)):
        open_splits(config_of(train_split=train, dev_split=dev, test_split=test))


@pytest.mark.parametrize(
    ("train", "dev"),
    [
        ("train[:90%]", "train[90%:]"),
        ("train[:1000]", "train[70%:]"),
        ("train[:80%][:90%]", "train[:80%][90%:]"),
    ],
)
def test_disjoint_splits_are_accepted(train, dev):
    assert open_splits(config_of(train_split=train, dev_split=dev)).dev is not None


def test_model_selection_or_training_on_test_images_logs_a_note():
    config = config_of(test_split="train[50%:]")
    config.checkpoint.keep_best = 1
    said = notes(config, open_splits(config))
    assert [line for line in said if "the test images are trained on" in line]
    assert [line for line in said if "keep_best chooses by the test images" in line]
    config.data.update(dict(train_split="train[:90%]", dev_split="train[90%:]", test_split="test"))
    assert notes(config, open_splits(config)) == []


def test_classes_shared_by_parts_of_a_mixture_log_a_note(tmp_path):
    for part, names in (("one", "01"), ("two", "12")):
        for split in ("train", "test"):
            make_folder(tmp_path / part / split, dict.fromkeys(names, 2))
    parts = tuple(f"folder:{tmp_path / part}" for part in ("one", "two"))
    config = config_of(source="mixture", parts=parts, train_split="train", test_split="test")
    (line,) = notes(config, open_splits(config))
    assert line.startswith("note: several of data.parts have the classes 1: each name is one class")


def test_an_evaluation_crop_below_half_of_the_image_logs_a_note():
    config = config_of(source="synthetic", image_size=64, test_resize=256)
    (line,) = notes(config, open_splits(config))
    assert line.startswith(
        "note: evaluation uses only the central 64 of 256 pixels, 6% of a square"
    )
    config.data.test_resize = 128
    assert notes(config, open_splits(config)) == []


def test_a_class_missing_from_a_slice_logs_a_note(tmp_path):
    make_folder(tmp_path / "train", {"common": 30, "rare": 1})
    make_folder(tmp_path / "test", {"common": 1, "rare": 1})
    halves = dict(train_split="train[:50%]", dev_split="train[50%:]")
    config = config_of(source="folder", path=str(tmp_path), **halves)
    (lost, unequal) = notes(config, open_splits(config))
    assert lost in ("note: no training images of rare", "note: no dev images of rare")
    assert unequal.startswith("note: the classes are unequal, 15 to ")
