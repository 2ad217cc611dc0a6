"""Resuming on changed data is refused, or can be accepted if the head's classes stay the same."""

import itertools
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from vit_jax.config import base_config, run_options, to_json
from vit_jax.data.sources import open_source
from vit_jax.data.sources.base import fingerprint
from vit_jax.errors import UserError
from vit_jax.runs import workdir as workdirs
from vit_jax.runs.data_identity import differences, identity_of, leak_warning
from vit_jax.runs.jobs import Job
from vit_jax.runs.rate_search import check_data
from vit_jax.runs.splits import open_splits
from vit_jax.runs.workdir import FORMAT, claim, run_of_checkpoint, saved_run, steps_of


def folder(path, names, images=4):
    """Writes random images in train/ and test/; pixels depend on the class's and image's number."""
    for split, (k, name) in itertools.product(("train", "test"), enumerate(names)):
        (path / split / name).mkdir(parents=True, exist_ok=True)
        for n in range(images):
            pixels = np.random.default_rng((k, n)).integers(256, size=(4, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path / split / name / f"{n}.png")
    return path


@pytest.fixture
def data(tmp_path):
    return folder(tmp_path / "data", ("apple", "berry", "cherry"))


def start(tmp_path, **values):
    """Claims the workdir for a run of two epochs on the folder, and returns its manifest."""
    config = base_config()
    config.data.update(dict(source="folder", path=str(tmp_path / "data")))
    config.update(dict(epochs=2, batch_size=4))
    config.update_from_flattened_dict(values)
    config = run_options(config)
    workdir = tmp_path / "run"
    identity = identity_of(open_splits(config))
    images, classes = identity["images"]["train"], len(identity["class_names"])
    manifest = dict(
        format=FORMAT,
        steps=steps_of(workdir, config) or config.steps or int(config.epochs * images / 4),
        model={"num_classes": classes},
        num_classes=classes,
        **identity,
    )
    with claim(workdir, config, manifest):
        # Now the run has made a step.
        (workdir / "checkpoints" / "1").mkdir(parents=True, exist_ok=True)
    return saved_run(workdir).manifest


def renamed(data, before, after):
    for split in ("train", "test"):
        (data / split / before).rename(data / split / after)


def test_a_run_on_copied_files_resumes(data, tmp_path):
    first = start(tmp_path)
    shutil.copytree(data, tmp_path / "copy")  # Copies have other modification times and inodes.
    shutil.rmtree(data)
    (tmp_path / "copy").rename(data)
    assert start(tmp_path) == first


def test_a_class_with_another_index_is_refused_also_with_the_flag(data, tmp_path, capsys):
    start(tmp_path)
    renamed(data, "apple", "zapple")
    for values in ({}, {"data.changed": "accepted"}):
        with pytest.raises(
            UserError, match="other data .no class 'apple'; a new class 'zapple'.*checkpoint="
        ):
            start(tmp_path, **values)


def test_the_error_about_another_learning_rate_names_a_warm_start(data, tmp_path):
    start(tmp_path)
    remedy = r"start a new run with config\.finetune\.checkpoint=.*/run and .*\.head=kept$"
    with pytest.raises(UserError, match=f"another config .*learning_rate.*{remedy}"):
        start(tmp_path, **{"optimizer.learning_rate": 0.5})


def test_other_images_are_refused_after_the_end_of_a_run_also_with_the_flag(data, tmp_path):
    manifest = start(tmp_path)
    folder(data, ("apple", "berry", "cherry"), images=6)
    row = {"step": manifest["steps"], "test/loss": 1.0}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    for changed in ("refused", "accepted"):
        with pytest.raises(UserError, match="the run has ended .*config.finetune.checkpoint="):
            start(tmp_path, **{"data.changed": changed})


@pytest.mark.parametrize("length", [{"epochs": 4}, {"epochs": None, "steps": 12}])
def test_a_run_that_has_ended_is_extended_on_other_images(length, data, tmp_path):
    constant = {"optimizer.schedule": "constant"}
    ended = {"step": start(tmp_path, **constant)["steps"], "test/loss": 1.0}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(ended) + "\n")
    folder(data, ("apple", "berry", "cherry"), images=6)
    values = constant | length | {"data.changed": "accepted"}
    assert start(tmp_path, **values)["steps"] > ended["step"]


def test_another_class_is_refused_also_with_the_flag(data, tmp_path):
    start(tmp_path)
    folder(data, ("apple", "avocado", "berry", "cherry"))
    with pytest.raises(
        UserError, match=r"a new class 'avocado'; training: 12 images, and now 16;.*6, and now 8"
    ):
        start(tmp_path)
    with pytest.raises(UserError, match="config.finetune.checkpoint="):
        start(tmp_path, **{"data.changed": "accepted"})


def test_a_renamed_class_may_be_accepted(data, tmp_path, capsys):
    start(tmp_path)
    renamed(data, "berry", "blackberry")
    with pytest.raises(
        UserError, match="no class 'berry'; a new class 'blackberry'.*changed='accepted'"
    ):
        start(tmp_path)
    manifest = start(tmp_path, **{"data.changed": "accepted"})
    assert manifest["class_names"] == ["apple", "blackberry", "cherry"]
    assert (
        "continues with other data than it began with: no class 'berry'" in capsys.readouterr().out
    )
    assert start(tmp_path) == manifest


def test_more_images_are_refused_or_accepted_for_the_steps_that_the_run_began_with(data, tmp_path):
    assert start(tmp_path)["steps"] == 6
    folder(data, ("apple", "berry", "cherry"), images=8)
    with pytest.raises(
        UserError, match="training: 12 images, and now 24; test: .*; steps: 6, and now 12"
    ):
        start(tmp_path)
    manifest = start(tmp_path, **{"data.changed": "accepted"})
    assert (manifest["steps"], manifest["images"]) == (6, {"train": 24, "test": 24})
    assert json.loads(saved_run(tmp_path / "run").text) == json.loads(
        to_json(saved_run(tmp_path / "run").config)
    )


def test_equally_many_files_with_other_names_or_sizes_are_refused(data, tmp_path):
    start(tmp_path)
    (data / "test" / "berry" / "0.png").rename(data / "test" / "berry" / "9.png")
    with pytest.raises(UserError, match=r"other data \(test: other names or sizes of files\)"):
        start(tmp_path)
    (data / "test" / "berry" / "9.png").rename(data / "test" / "berry" / "0.png")
    start(tmp_path)
    with (data / "train" / "berry" / "1.png").open("ab") as file:
        file.write(b" ")
    with pytest.raises(UserError, match=r"other data \(training: other names or sizes of files\)"):
        start(tmp_path)


def test_a_sweep_rejects_runs_that_were_trained_on_other_data(data, tmp_path):
    start(tmp_path)
    config = saved_run(tmp_path / "run").config
    jobs = [Job(tmp_path / "not begun", ()), Job(tmp_path / "run", ())]
    check_data(jobs, config)
    folder(data, ("apple", "berry", "cherry"), images=8)
    check_data(jobs[:1], config)
    with pytest.raises(
        UserError, match="run was trained on other data .training: 12 images, and now 24"
    ):
        check_data(jobs, config)


def test_runs_of_earlier_versions_are_compared_by_their_manifests_values():
    saved = {"class_names": ["a", "b"], "images": {"train": 4, "test": 2}, "steps": 3}
    given = saved | {"data": {"train": {"files": "1"}, "test": {"files": "2"}}}
    assert differences(saved, given) == []
    assert differences(saved, given | {"class_names": ["b", "a"]}) == [
        "classes in another order, class 0 is 'b' and was 'a'"
    ]


@pytest.mark.parametrize("split", ["all", "all[:50%]"])
def test_a_fingerprint_is_of_names_and_sizes_below_the_folder(tmp_path, split):
    places = [folder(tmp_path / name, ("apple", "berry")) / "train" for name in ("here", "there")]
    here, there = (fingerprint(open_source("folder", split, path=str(place))) for place in places)
    assert here == there
    for file in places[1].rglob("*.png"):
        file.write_bytes(file.read_bytes() + b" ")
    there = fingerprint(open_source("folder", split, path=str(places[1])))
    assert {key for key in here if here[key] != there[key]} == {"files", "examples"}


def test_a_part_of_a_mixture_is_identified_by_its_own_files(tmp_path):
    places = [folder(tmp_path / name, ("apple", "berry")) / "train" for name in ("here", "there")]
    parts = tuple(f"folder:{place}" for place in places)
    mixture = open_source("mixture", "all", parts=parts)
    files = [*mixture.stored_files()]
    assert files == [*open_source("folder", "all", path=str(places[0])).stored_files()] * 2
    assert [*mixture.stored_files([0, 9])] == [files[0], files[9]]


def sliced(path, **values):
    """Returns the config of a run on slices of a folder of classes, and fingerprints of them."""
    config = base_config()
    splits = dict(train_split="all[:50%]", dev_split="all[50%:75%]", test_split="all[75%:]")
    config.data.update(dict(source="folder", path=str(path)) | splits)
    config.update_from_flattened_dict(values)
    config = run_options(config)
    return config, identity_of(open_splits(config))["data"]


@pytest.mark.parametrize(
    ("values", "leaking"),
    [
        ({}, "dev images (all[50%:75%]) and test images (all[75%:])"),
        ({"data.dev_split": None}, "test images (all[75%:])"),
    ],
)
def test_slices_of_a_folder_that_grew_after_the_checkpoints_run_log_a_warning(
    tmp_path, values, leaking
):
    photos = folder(tmp_path / "data", ("apple", "berry")) / "train"
    earlier, data = sliced(photos)
    later, same = sliced(photos, **{"finetune.checkpoint": "runs/first"} | values)
    assert leak_warning(later, same, earlier, {"data": data}) is None
    folder(tmp_path / "data", ("apple", "berry"), images=8)
    later, grown = sliced(photos, **{"finetune.checkpoint": "runs/first"} | values)
    line = leak_warning(later, grown, earlier, {"data": data})
    assert line.startswith(f"warning: some of the {leaking} may be training images of the run runs")


def test_a_test_folder_or_a_checkpoint_of_unlabelled_images_logs_no_leak(tmp_path):
    whole = {"data.train_split": "train", "data.dev_split": None, "data.test_split": "test"}
    data = folder(tmp_path / "data", ("apple", "berry"))
    labelled, before = sliced(data, **whole)
    unlabelled, _ = sliced(data / "train", **{"objective.name": "masked_patch"})
    folder(data, ("apple", "berry"), images=8)
    assert leak_warning(*sliced(data, **whole), labelled, {"data": before}) is None
    assert leak_warning(*sliced(data / "train"), unlabelled, {"data": {}}) is None


def test_hashed_slices_of_a_folder_that_grew_leak_only_where_they_overlap(tmp_path):
    slices = {"data.slices": "hashed"}
    photos = folder(tmp_path / "data", ("apple", "berry"), images=40) / "train"
    earlier, data = sliced(photos, **slices)
    folder(tmp_path / "data", ("apple", "berry"), images=80)
    later = {"finetune.checkpoint": "runs/first"}
    assert leak_warning(*sliced(photos, **later | slices), earlier, {"data": data}) is None
    other = {"data.train_split": "all[:40%]", "data.dev_split": "all[40%:75%]"}
    line = leak_warning(*sliced(photos, **later | slices | other), earlier, {"data": data})
    assert line.startswith("warning: some of the dev images (all[40%:75%]) may be training images")
    assert leak_warning(*sliced(photos, **later), earlier, {"data": data})  # Stratified slices.


def test_other_slices_of_unchanged_data_log_no_leak(tmp_path):
    """Both runs have the same training images, and the later test images are a part of the dev."""
    photos = folder(tmp_path / "data", ("apple", "berry")) / "train"
    whole = {"data.dev_split": None, "data.test_split": "all[50%:]"}
    earlier, before = sliced(photos, **whole)
    later, data = sliced(photos, **{"finetune.checkpoint": "runs/first"})
    assert data["test"] != before["test"]
    assert leak_warning(later, data, earlier, {"data": before}) is None
    # With fewer images of `all` in training, the earlier run has trained on some of the test images.
    earlier, before = sliced(photos, **{"data.train_split": "all[25%:75%]"} | whole)
    assert leak_warning(later, data, earlier, {"data": before})


@pytest.mark.parametrize(("names", "warned"), [(("apple", "berry"), True), ((), False)])
def test_a_checkpoint_of_an_objective_of_a_program_logs_a_leak_if_it_had_labels(
    names, warned, tmp_path
):
    """The objective's class is not known to the later run."""
    photos = folder(tmp_path / "data", ("apple", "berry")) / "train"
    earlier, data = sliced(photos)
    earlier = replace(earlier, objective=replace(earlier.objective, name="Mine"))
    folder(tmp_path / "data", ("apple", "berry"), images=8)
    later, grown = sliced(photos, **{"finetune.checkpoint": "runs/first"})
    manifest = {"data": data, "class_names": names}
    assert bool(leak_warning(later, grown, earlier, manifest)) == warned


def test_the_run_of_a_checkpoint_in_a_bucket_is_found(data, tmp_path, monkeypatch):
    manifest = start(tmp_path)
    monkeypatch.setattr(workdirs, "fetched", {"gs://bucket/run": tmp_path / "run"}.__getitem__)
    for source in ("gs://bucket/run@best", str(tmp_path / "run")):
        assert run_of_checkpoint(source).manifest["steps"] == manifest["steps"]
    assert run_of_checkpoint("hf://owner/name") is None
