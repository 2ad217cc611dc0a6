"""Tests of few-shot evaluation: the images that are read, the choice of shots, the accuracies."""

import functools
import json

import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tests.data.test_slices import make_folder
from tests.evaluation import plain
from vit_jax.config import base_config, run_options
from vit_jax.data.sources import data_set, open_source
from vit_jax.data.sources.base import Subset
from vit_jax.data.sources.in_memory import InMemory
from vit_jax.errors import UserError
from vit_jax.evaluation import fewshot
from vit_jax.evaluation.features import extractor_of, transfer_crop
from vit_jax.evaluation.fewshot import Accuracy, FewShotTask, choose, few_shot
from vit_jax.load import load_model
from vit_jax.models import create_model
from vit_jax.parallel.mesh import make_mesh
from vit_jax.run_suites import run_suites
from vit_jax.runs.loop import train

MESH = make_mesh()
SMALL = dict(image_size=16, dim=16, depth=1, mlp_dim=32, heads=2)
DIGITS = open_source("digits", "train"), open_source("digits", "test")


@pytest.fixture(scope="module")
def model() -> nnx.Module:
    return create_model("ViT-Ti/4", num_classes=10, **SMALL)


class Watched(InMemory):
    """A data source that records which images are read."""

    def __getitem__(self, index):
        self.read.add(index)
        return super().__getitem__(index)


def watched(source: InMemory) -> Watched:
    found = Watched(source.name, source.images, source.labels, source.class_names)
    object.__setattr__(found, "read", set())
    return found


@pytest.fixture(scope="module")
def found(model):
    """Returns accuracies on the digits, and the source of the training images."""
    source = watched(DIGITS[0])
    return few_shot(
        model, source, DIGITS[1], shots=(1, 5), seeds=(0, 1), penalties=(1.0, 1024.0)
    ), source


def test_only_the_chosen_training_images_are_read(found):
    chosen = choose(DIGITS[0].labels, DIGITS[0].class_names, 5, (0, 1), "digits")
    assert found[1].read == set(np.concatenate([*chosen.values()], axis=None).tolist())


def test_accuracies_are_those_of_the_formula_on_the_models_features(found, model):
    extractor, params = extractor_of(model, MESH, batch_size=64)
    train_features, test_features = (extractor(params, source) for source in DIGITS)
    chosen = choose(DIGITS[0].labels, DIGITS[0].class_names, 5, (0, 1), "digits")
    assert [(one.shots, one.penalty) for one in found[0]] == [
        (1, 1.0),
        (1, 1024.0),
        (5, 1.0),
        (5, 1024.0),
    ]
    for one in found[0]:
        for seed, accuracy in one.by_seed.items():
            rows = chosen[seed][:, : one.shots].ravel()
            values, labels = train_features.values[rows].astype(float), DIGITS[0].labels[rows]
            weights = plain.dual(values, labels, 10, one.penalty)
            right = plain.accuracy(
                weights, values, test_features.values, test_features.labels[:, 0]
            )
            # An image may lie on the decision boundary.
            assert accuracy == pytest.approx(right, abs=1 / 360)


def test_mean_and_std_are_over_the_seeds():
    one = Accuracy(5, 1024.0, {0: 0.5, 1: 0.6, 2: 0.7})
    assert (one.mean, one.deviation) == (pytest.approx(0.6), pytest.approx(0.1))
    assert Accuracy(5, 1024.0, {0: 0.5}).deviation == 0


def test_features_of_a_model_with_a_head_are_the_outputs_without_it():
    options = SMALL | dict(pre_logits=True)
    model = create_model("ViT-Ti/4", num_classes=10, distillation="heads", **options)
    # The heads are initialized last, so all other parameters are equal.
    bare = create_model("ViT-Ti/4", num_classes=0, distillation="token", **options)
    extractor, params = extractor_of(model, MESH, batch_size=4)
    features = extractor(params, Subset(DIGITS[0], range(4))).values
    images = np.stack([transfer_crop(16)(DIGITS[0][index].image) for index in range(4)])
    expected = nnx.jit(lambda model, images: model(images))(bare, images / np.float32(127.5) - 1)
    np.testing.assert_allclose(features, expected, atol=1e-5)


@pytest.mark.parametrize(("size", "resize"), [(224, 256), (384, 439), (16, 18)])
def test_preprocessing_is_the_protocols_at_any_size(size, resize):
    crop = transfer_crop(size)
    assert (crop.size, crop.kind, crop.resize) == (size, "square", resize)


def test_computing_features_logs_its_progress(model, monkeypatch):
    monkeypatch.setattr("vit_jax.progress.SECONDS", 0)
    said = []
    extractor, params = extractor_of(model, MESH, batch_size=16, log=said.append)
    extractor(params, Subset(DIGITS[1], range(48)))
    assert [line.split(" | ")[0] for line in said] == [
        f"features: {n} of 48 images" for n in (16, 32)
    ]
    assert all(line.endswith(" left") for line in said)


def test_images_that_are_not_square_are_refused():
    with pytest.raises(UserError, match="32x16 pixels"):
        transfer_crop((32, 16))


def test_unreadable_images_of_both_splits_are_skipped_and_logged(model, tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for shade, name in ((40, "dark"), (200, "light")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(4):
                pixels = (shade + rng.integers(-20, 20, (9, 9, 3))).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / "3.png").write_bytes(b"not a picture")
    sources = [open_source("folder", split, path=str(tmp_path)) for split in ("train", "test")]
    said = []
    (one,) = few_shot(model, *sources, shots=(4,), seeds=(0,), penalties=(1.0,), log=said.append)
    assert one.by_seed == {0: 1.0}
    assert sorted(line.split(" (not")[0].split("/")[-3:] for line in said) == [
        [split, "light", "3.png"] for split in ("test", "train")
    ]


def test_shots_are_nested_and_of_their_class():
    labels = np.random.default_rng(0).integers(4, size=200)
    few, many = (choose(labels, "abcd", shots, (0, 1), "data") for shots in (3, 20))
    for seed in (0, 1):
        assert (labels[many[seed]] == np.arange(4)[:, None]).all()
        assert all(len(set(row)) == 20 for row in many[seed])
        np.testing.assert_array_equal(many[seed][:, :3], few[seed])
    assert (many[0] != many[1]).any()


def test_the_error_about_too_few_images_names_the_class_and_the_largest_number_of_shots():
    with pytest.raises(
        UserError,
        match=(
            "^pets: class 'fox' has 2 training images, fewer than 5 shots; 2 are the most that all"
        ),
    ):
        choose(np.array([0] * 9 + [1] * 2 + [2] * 7), ("cat", "fox", "owl"), 5, (0,), "pets")


def test_the_error_about_a_class_without_images_names_it():
    with pytest.raises(UserError, match="class 'c' has 0 training images"):
        choose(np.array([0, 1]), "abc", 1, (0,), "data")


def test_the_error_about_several_labels_names_the_image():
    class Several(InMemory):
        def known_labels(self):
            table = np.full((len(self), 2), -1, np.int32)
            table[:, 0] = 0
            table[7, 1] = 1
            return table

    source = Several("", DIGITS[0].images, DIGITS[0].labels, DIGITS[0].class_names, max_labels=2)
    with pytest.raises(UserError, match="^digits: image 7 has 2 labels"):
        FewShotTask("digits", source, DIGITS[1])


def test_suite_is_the_protocols():
    assert [(s.path, s.train_split, s.test_split) for s in fewshot.DATA_SETS] == [
        ("caltech_birds2011", "train", "test"),
        ("caltech101", "train", "test"),
        ("cars196:2.1.0", "train", "test"),
        ("cifar100", "train", "test"),
        ("colorectal_histology", "train[:2000]", "train[2000:]"),
        ("dtd", "train", "test"),
        ("imagenet2012", "train[:65000]", "validation"),
        ("oxford_iiit_pet", "train", "test"),
        ("uc_merced", "train[:1000]", "train[1000:]"),
    ]
    assert (fewshot.SHOTS, fewshot.SEEDS, fewshot.PENALTY) == ((1, 5, 10, 25), (0, 1, 2), 2**10)


@pytest.mark.parametrize(
    ("text", "described"),
    [
        ("digits:", ("digits", "digits", "", "train", "test")),
        ("tfds:cifar100", ("cifar100", "tfds", "cifar100", "train", "test")),
        ("tfds:cars196:2.1.0", ("cars196", "tfds", "cars196:2.1.0", "train", "test")),
        (
            "tfds:eurosat/rgb:/data@train,val",
            ("eurosat", "tfds", "eurosat/rgb:/data", "train", "val"),
        ),
        ("tfds:gs://data/dtd/3.0.1", ("dtd", "tfds", "gs://data/dtd/3.0.1", "train", "test")),
        (
            "folder:/data/pets/@all[:90%],all[90%:]",
            ("pets", "folder", "/data/pets/", "all[:90%]", "all[90%:]"),
        ),
    ],
)
def test_a_data_set_is_parsed_from_one_text(text, described):
    assert data_set(text) == described


@pytest.mark.parametrize(
    "text", ["cifar100", "tfds:", "tdfs:cifar100", "tfds:cifar100@train", "folder:/a@b,"]
)
def test_errors_about_invalid_data_sets_name_them(text):
    with pytest.raises(UserError, match="there is no /data/absent: write it as tfds:cifar100"):
        fewshot.data_set("/data/absent")
    with pytest.raises(UserError, match="cannot read the data set '.*tfds:cifar100, folder:"):
        data_set(text)


def config(**values):
    made = base_config()
    made.update(dict(batch_size=32, steps=4, log_every=2, evaluate_every=2))
    made.model.update(dict(name="ViT-Ti/4") | {k: v for k, v in SMALL.items() if k != "image_size"})
    made.data.update(dict(image_size=16, test_resize=16))
    made.optimizer.warmup_steps = 1
    made.fewshot.update(dict(every=4, sets=("digits:",), shots=(1, 5), seeds=(0, 1)) | values)
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trains a run that was stopped in its first few-shot evaluation and then resumed.

    It runs k-NN during training, and other suites at its end.
    """
    probed = config(every=2)
    probed.knn.update(dict(every=4, sets=("digits:",), neighbours=(20, 1)))
    probed.evaluate.update(
        dict(suites=("probe", "sgd_probe"), options=("set=digits:", "probe_steps=30"))
    )
    workdir = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vit_jax.evaluation.in_training.TrainingSuites.__call__", lambda *_: None)
        assert train(run_options(probed), workdir) == {}
    assert train(run_options(probed), workdir)
    return workdir


@pytest.mark.slow
def test_an_interrupted_evaluation_is_repeated_after_the_restart(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "test/accuracy" in row] == [2, 4]
    assert [row["step"] for row in rows if "fewshot/digits/5" in row] == [2, 4]


@pytest.mark.slow
def test_training_run_writes_the_accuracies_of_its_parameters(run):
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for one in few_shot(load_model(run, log=str), *DIGITS, shots=(1, 5), seeds=(0, 1)):
        assert row[f"fewshot/digits/{one.shots}"] == pytest.approx(one.mean, abs=1 / 360)
    line = f"step 4 | few-shot accuracy on digits | 1: {row['fewshot/digits/1']:.2%} | 5: "
    assert line in (run / "log.txt").read_text()


@pytest.mark.slow
def test_a_suite_without_an_interval_runs_only_at_the_end(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    probed = [row for row in rows if any(key.startswith("probe/") for key in row)]
    assert [row["step"] for row in probed] == [4]
    linear = probed[0]["probe/digits/linear probe"]
    assert 0.2 < linear < 1
    log = (run / "log.txt").read_text()
    assert f"step 4 | probe digits | linear probe: {linear:.2%}" in log
    # A model of one layer has no four class tokens, and unavailable features have no metric.
    by_sgd = {key: value for key, value in probed[0].items() if key.startswith("sgd_probe/")}
    choices = ("best features", "class token", "class token and patches")
    assert [*by_sgd] == [f"sgd_probe/digits/{choice}" for choice in choices]
    assert 0.2 < max(by_sgd.values()) < 1
    shown = " | ".join(
        f"{choice}: {by_sgd[f'sgd_probe/digits/{choice}']:.2%}" for choice in choices
    )
    assert f"step 4 | linear probe by SGD on digits | {shown}" in log


@pytest.mark.slow
def test_knn_during_training_equals_knn_on_the_checkpoint(run, tmp_path):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (row,) = (row for row in rows if "knn/digits/20" in row)
    near, nearest = row["knn/digits/20"], row["knn/digits/1"]
    assert row["step"] == 4 and 0.2 < near < 1 and near != nearest
    line = f"step 4 | k-NN accuracy on digits | 20: {near:.2%} | 1: {nearest:.2%}"
    assert line in (run / "log.txt").read_text()
    options = {"set": [data_set("digits:")], "neighbours": [1, 20]}
    found = run_suites(run, ["knn"], tmp_path, options=options, log=str).rows
    assert {row.name: row.accuracy for row in found.values()} == {
        "digits, 1-NN": pytest.approx(nearest, abs=1 / 360),
        "digits, 20-NN": pytest.approx(near, abs=1 / 360),
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            dict(suites=("vtab",)),
            "no suite 'vtab' for training; there are: fewshot, imagenet, knn, probe",
        ),
        (
            dict(suites=("probe",), options=("sets=digits:",)),
            "no option 'sets'; did you mean 'set'",
        ),
        (
            dict(suites=("fewshot",), options=("shots=0",)),
            "shots=0: give whole numbers, 1 or above",
        ),
        (
            dict(suites=("probe",), options=("set=folder:/nowhere",)),
            "evaluate.suites: cannot open probe, nowhere, linear probe: no folder",
        ),
    ],
)
def test_suite_that_cannot_be_run_ends_a_run_before_it_starts(values, message, tmp_path):
    asked = config()
    asked.fewshot.every = 0
    asked.evaluate.update(values)
    with pytest.raises(UserError, match=message):
        train(run_options(asked), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_signal_at_any_moment_ends_an_evaluation_without_a_result(model):
    task = FewShotTask("digits", *DIGITS, shots=(1,), seeds=(0,))
    extractor, params = extractor_of(model, MESH, batch_size=200)
    moments = 1 + 2 + 1  # One batch of training images, two batches of test images, and a fit.
    for allowed in range(moments + 1):
        answers = iter([True] * allowed)
        result = task.accuracies(extractor, params, go_on=functools.partial(next, answers, False))
        assert (result is None) == (allowed < moments)


def test_data_set_with_too_few_images_ends_a_run_before_it_starts(tmp_path):
    with pytest.raises(UserError, match="^digits: class .* fewer than 400 shots"):
        train(run_options(config(shots=(1, 400))), tmp_path / "run")
    # Otherwise the folder would already belong to this config.
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "neighbours", "message"),
    [
        (
            "digits:",
            (10, 2000),
            "^digits has 1437 training images, the most neighbours that are possible$",
        ),
        ("folder:/nowhere", (10,), "^config.knn.sets: cannot open folder:/nowhere: no folder"),
    ],
)
def test_impossible_numbers_of_neighbours_end_a_run_before_it_starts(
    text, neighbours, message, tmp_path
):
    asked = config(every=0)
    asked.knn.update(dict(every=4, sets=(text,), neighbours=neighbours))
    with pytest.raises(UserError, match=message):
        train(run_options(asked), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_of_classes_without_splits_is_split_in_two_and_logged(tmp_path):
    make_folder(tmp_path / "pets", {"ant": 10, "cat": 30, "rare": 1})
    said = []
    described = fewshot.cut_in_two(fewshot.data_set(f"folder:{tmp_path / 'pets'}"), said.append)
    train, test = fewshot.open_data_set(described, log=said.append)
    for source, ants in ((train, 8), (test, 2)):
        counts = np.bincount(source.label_table()[:, 0], minlength=3)
        assert abs(counts[0] - ants) <= 1 and abs(counts[1] - 3 * ants) <= 1
    assert "pets has no folders train and test: all[:80%] of each class is to train" in said[0]
    assert said[1:] in (["pets: no test images of rare"], ["pets: no training images of rare"])


def test_a_folder_with_splits_is_used_unchanged(tmp_path):
    make_folder(tmp_path / "pets" / "train", {"ant": 1, "cat": 1})
    pets = f"folder:{tmp_path / 'pets'}"
    for text in (pets, f"{pets}/train@all[:1],all[1:]", "digits:"):
        described = fewshot.data_set(text)
        assert fewshot.cut_in_two(described, pytest.fail) == described


@pytest.mark.parametrize(
    ("splits", "expected"),
    [(("train", "valid"), "valid"), (("train", "val", "test"), "test"), (("train",), "test")],
)
@pytest.mark.parametrize("lists", [False, True])
def test_the_dev_split_is_evaluated_if_there_is_no_test_split(tmp_path, splits, expected, lists):
    for split in splits:
        if lists:
            (tmp_path / f"{split}.csv").write_text("file,label\n0.jpg,cat\n")
        else:
            make_folder(tmp_path / split, {"ant": 1, "cat": 1})
    lines = []
    described = fewshot.with_test_split(fewshot.data_set(str(tmp_path)), lines.append)
    assert described.test_split == expected
    said = f"{tmp_path.name} has no split test: valid is evaluated"
    assert [line.startswith(said) for line in lines] == ([] if expected == "test" else [True])
    named = fewshot.data_set(f"{tmp_path}@train,train[:1]")
    assert fewshot.with_test_split(named, pytest.fail) == named


def test_a_missing_data_set_ends_a_run_before_it_starts(tmp_path):
    with pytest.raises(
        UserError, match="^config.fewshot.sets: cannot open folder:/nowhere: no folder"
    ):
        train(run_options(config(sets=("folder:/nowhere",))), tmp_path / "run")
