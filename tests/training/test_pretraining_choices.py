"""Tests of the values that `pretrain` chooses (crops, length, k-NN, memory), and of its errors."""

from types import SimpleNamespace

import pytest

from tests.training.test_choices import checkpoint, photographs  # noqa: F401
from vit_jax.command import as_in_file, read_config
from vit_jax.config import check, given_keys, leaves, run_options
from vit_jax.errors import UserError
from vit_jax.models import model_options
from vit_jax.runs.choices import micro_batches, pretraining, settle
from vit_jax.runs.memory_check import Needs


@pytest.fixture(autouse=True)
def speed(monkeypatch):
    """Sets the device's speed and makes its memory unknown."""
    monkeypatch.setattr(pretraining, "flops_per_second", lambda: 1e9)
    monkeypatch.setattr(micro_batches, "memory_of", lambda device: (None, 0.0))


def chosen(path, start, said=None, **changes) -> dict:
    """Returns the values that are chosen for a folder."""
    config = read_config("my_images_unlabelled")
    values = {"data.path": str(path)} | pretraining.start_values(str(start), None)
    config.update_from_flattened_dict(values | changes)
    lines = [] if said is None else said
    return dict(
        leaves(settle(run_options(config), given_keys(config), path.parent / "none", lines.append))
    )


def test_class_folders_have_k_nn_and_the_better_model_is_kept(tmp_path, checkpoint):  # noqa: F811
    said = []
    values = chosen(photographs(tmp_path / "pets", {"cat": 60, "dog": 40}), checkpoint, said)
    assert (values["data.train_split"], values["data.dev_split"]) == ("all[:80%]", "all[80%:90%]")
    assert values["knn.sets"] == (f"folder:{tmp_path / 'pets'}@all[:50],all[50:100]",)
    assert (values["checkpoint.final"], values["checkpoint.keep_best"]) == ("best", 1)
    assert (values["objective.name"], values["batch_size"], values["steps"]) == ("dino", 32, 125)
    assert values["dino.prototypes"] == 256 and values["data.image_size"] == 32
    assert any(
        "--config.knn.sets" in line and "2 classes, which are not trained on" in line
        for line in said
    )


def test_images_nested_in_any_way_need_no_classes(tmp_path, checkpoint):  # noqa: F811
    said = []
    photographs(tmp_path / "all", {"": 3, "2024": 2, "2024/may/tenth": 35})
    values = chosen(tmp_path / "all", checkpoint, said)
    assert values["data.train_split"] == "all[:80%]" and values["batch_size"] == 32
    assert values["knn.sets"] == () and values["checkpoint.final"] == "last"
    assert any("no k-NN, as there are no labels" in line for line in said)


@pytest.mark.parametrize("more", [{}, {"extra": 5}])
def test_test_images_of_a_folder_with_splits_are_not_trained_on(tmp_path, checkpoint, more):  # noqa: F811
    splits = {"train/a": 30, "train/b": 30, "test/a": 9, "test/b": 9}
    photographs(tmp_path / "data", splits | more)
    values = chosen(tmp_path / "data", checkpoint)
    assert [values[f"data.{key}"] for key in pretraining.SPLIT_KEYS] == [
        *("train[:80%]", "train[80%:90%]", "train[90%:]")
    ]


def test_the_length_follows_from_the_time(tmp_path, checkpoint, monkeypatch):  # noqa: F811
    folder = photographs(tmp_path / "pets", {"cat": 60, "dog": 40})
    monkeypatch.setattr(pretraining, "flops_per_second", lambda: 1e8)
    monkeypatch.setattr(pretraining.Start, "multiply_adds", lambda start, size: 1_000_000)
    # An image takes 2 (2 x 4 + 3 x 2) million operations, which is 0.28 s. Training steps get half
    # of the time.
    assert chosen(folder, checkpoint, minutes=4.0)["steps"] == int(120 / (32 * 0.28))
    assert chosen(folder, checkpoint, minutes=8.0)["steps"] == int(240 / (32 * 0.28))


def test_a_step_that_does_not_fit_is_cut_into_micro_batches_with_koleo_in_each(
    tmp_path,
    checkpoint,  # noqa: F811
    monkeypatch,
):
    folder = photographs(tmp_path / "pets", {"cat": 60, "dog": 40})

    class Parts:
        """A run whose step needs a gigabyte for each image of a micro-batch."""

        splits = SimpleNamespace(train=SimpleNamespace(max_labels=1))
        origin = SimpleNamespace(
            options=model_options("ViT-Ti/16", num_classes=0, image_size=32, patch_size=8)
        )
        program_of = staticmethod(lambda config: None)

    def needs(program, config, max_labels):
        left = 1 if config.model.remat == "none" else 0.2
        return Needs(0, 0, 0, 0, int(left * 1e9 * config.batch_size // config.micro_batches))

    monkeypatch.setattr(micro_batches, "assemble", lambda config: Parts)
    monkeypatch.setattr(micro_batches, "needs_of", needs)
    monkeypatch.setattr(micro_batches, "compiled_bytes", lambda *_: 2 * needs(*_).activations)
    for free, micro, remat in ((100e9, 1, "none"), (25e9, 4, "none"), (2e9, 8, "full")):
        monkeypatch.setattr(micro_batches, "memory_of", lambda device, free=free: (100e9, free))
        values = chosen(folder, checkpoint)
        assert (values["micro_batches"], values["model.remat"]) == (micro, remat)
        assert values["dino.koleo_group"] == (32 // micro if micro > 1 else None)
    monkeypatch.setattr(micro_batches, "memory_of", lambda device: (100e9, 1e8))
    with pytest.raises(UserError, match="not even 2 images of 32 pixels fit"):
        chosen(folder, checkpoint)


def test_values_of_the_user_take_precedence_and_unused_options_are_reset(tmp_path, checkpoint):  # noqa: F811
    folder = photographs(tmp_path / "pets", {"cat": 60, "dog": 40})
    changes = {
        "batch_size": 8,
        "steps": 5,
        "dino.local_crops": 0,
        "optimizer.learning_rate": 1e-3,
    }
    values = chosen(folder, checkpoint, **changes)
    assert {key: values[key] for key in changes} == changes
    assert values["evaluate_every"] == 5
    assert chosen(folder, checkpoint, **{"objective.name": "mae"})["dino.koleo"] == 0


def test_random_parameters_start_a_small_vit_at_a_higher_rate(tmp_path):
    values = chosen(
        photographs(tmp_path / "pets", {"cat": 60, "dog": 40}), "scratch", minutes=100.0
    )
    assert values["model.name"] == "ViT-Ti/16" and values["finetune.checkpoint"] is None
    assert values["optimizer.learning_rate"] == pytest.approx(3.5e-4)


@pytest.mark.parametrize("name", ["my_images", "my_images_unlabelled"])
def test_a_config_needs_no_checkpoint_if_the_command_chooses_one(name):
    config = read_config(name)
    config.data.path = "photos"
    check(config, file=as_in_file(config))


def test_folders_without_enough_images_are_refused(tmp_path, checkpoint):  # noqa: F811
    with pytest.raises(UserError, match="has 3 images; training without labels needs 4"):
        chosen(photographs(tmp_path / "few", {"cat": 3}), checkpoint)
    with pytest.raises(
        UserError, match="there is no .*none: give a folder of images, nested in any way"
    ):
        chosen(tmp_path / "none", checkpoint)
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="no images in"):
        chosen(tmp_path / "none", checkpoint)
