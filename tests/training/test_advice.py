"""Tests of errors of `finetune` and `pretrain` about unusual data or checkpoints.

An error is one line. The tests follow its advice and check that it works.
"""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import vit_jax
from tests.data.prepared import prepare
from tests.training.test_choices import checkpoint, chosen, photographs  # noqa: F401
from vit_jax.classifier import open_classifier
from vit_jax.command import read_config
from vit_jax.config import check, given_keys, run_options
from vit_jax.data.image_files import find_images
from vit_jax.data.sources import data_set, open_source
from vit_jax.errors import UserError
from vit_jax.planning.cost import data_set_size
from vit_jax.preparation.duplicates_page import find_duplicates
from vit_jax.preparation.readers import find
from vit_jax.preparation.writer import Options
from vit_jax.preparation.writer import prepare as prepared
from vit_jax.runs.choices import micro_batches, settle
from vit_jax.runs.choices.recognised import recognise
from vit_jax.runs.memory_check import Needs
from vit_jax.runs.splits import open_splits


def refusal(path, checkpoint, **changes) -> str:  # noqa: F811
    with pytest.raises(UserError) as caught:
        chosen(path, checkpoint, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def flags(message: str) -> dict:
    """Returns the config values that are set by the flags in a message."""
    found = re.findall(r"--config\.([\w.]+)=(?:\"(.*?)\"|'(.*?)'|([^\s;]+))", message)
    texts = {key: one or two or three for key, one, two, three in found}
    return {key: eval(text) if text.startswith("(") else text for key, text in texts.items()}


def write_csv(folder, rows, header="file,label\n"):
    (folder / "list.csv").write_text(header + "".join(f"{file},{label}\n" for file, label in rows))
    return folder / "list.csv"


@pytest.fixture
def images(tmp_path):
    """Writes a folder `images` of 30 images; returns its parent and rows for a CSV there."""
    photographs(tmp_path, {"images": 30})
    return tmp_path, [(f"images/{k:03}.png", "cat" if k % 2 else "dog") for k in range(30)]


def test_a_class_with_one_image_is_excluded_by_the_flag_of_the_error(tmp_path, checkpoint):  # noqa: F811
    pets = photographs(tmp_path / "pets", {"cat": 8, "dog": 8, "fox": 1})
    message = refusal(pets, checkpoint)
    assert "1 image of the class fox" in message
    assert chosen(pets, checkpoint, **flags(message))["data.classes"] == ("cat", "dog")


def test_an_ambiguous_folder_is_read_after_either_advice(tmp_path, checkpoint):  # noqa: F811
    pets = photographs(tmp_path / "things", {"car": 9, "bus": 9, "train": 9})
    message = refusal(pets, checkpoint)
    assert "can be read in two ways" in message and "rename it, such as to train_class" in message
    (pets / "train").rename(pets / "train_class")
    assert chosen(pets, checkpoint)["data.train_split"] == "all[:60%]"
    (pets / "train_class").rename(pets / "train")
    for name in ("car", "bus"):
        shutil.move(pets / name, tmp_path / name)
    photographs(pets / "train", {"car": 9, "bus": 9})
    assert chosen(pets, checkpoint)["data.train_split"] == "train[:70%]"


def test_a_split_to_train_on_is_named_by_the_flag_of_the_error(tmp_path, checkpoint):  # noqa: F811
    for split in ("val", "test"):
        photographs(tmp_path / "pets" / split, {"cat": 10, "dog": 10})
    message = refusal(tmp_path / "pets", checkpoint)
    values = chosen(tmp_path / "pets", checkpoint, **flags(message))
    splits = [values[f"data.{name}_split"] for name in ("train", "dev", "test")]
    assert splits == ["val[:70%]", "val[85%:]", "test"]


def test_one_class_is_refused_before_a_checkpoint_is_fetched(tmp_path):
    pets = photographs(tmp_path / "pets", {"cat": 20})
    message = refusal(pets, "hf://nobody/nothing")
    assert "images of one class, 'cat', and a classifier needs two" in message
    assert f"vit-jax pretrain {pets}" in message


def test_a_folder_that_contains_only_the_folder_of_classes_is_entered(tmp_path, checkpoint):  # noqa: F811
    photographs(tmp_path / "unpacked" / "pets", {"cat": 10, "dog": 10})
    values = chosen(tmp_path / "unpacked", checkpoint)
    assert values["data.path"] == str(tmp_path / "unpacked" / "pets")


def test_missing_files_of_a_csv_are_counted_and_the_rest_is_read(images, checkpoint):  # noqa: F811
    folder, rows = images
    lost = [("images/lost.png", "cat"), ("images/gone.png", "dog")]
    message = refusal(write_csv(folder, rows + lost), checkpoint)
    assert (
        "2 of 32 files that are listed do not exist (2 of all), such as images/lost.png" in message
    )
    assert chosen(write_csv(folder, rows), checkpoint)["data.source"] == "csv"


def test_missing_files_of_every_split_of_a_csv_are_counted(images, checkpoint):  # noqa: F811
    folder, rows = images
    splits = {"train": rows[:18], "val": rows[18:24], "test": rows[24:]}
    lost = {
        "val": [("images/lost.png", "cat")],
        "test": [("images/gone.png", "dog"), ("images/no.png", "cat")],
    }
    for name, more in ({name: lost.get(name, []) for name in splits}).items():
        write_csv(folder, splits[name] + more).rename(folder / f"{name}.csv")
    message = refusal(folder, checkpoint)
    assert "3 of 33 files that are listed do not exist (1 of val, 2 of test)" in message
    assert "such as images/lost.png, images/gone.png, images/no.png: fix their paths" in message
    for name, kept in splits.items():
        write_csv(folder, kept).rename(folder / f"{name}.csv")
    assert chosen(folder, checkpoint)["data.test_split"] == "test"


def test_the_column_of_labels_is_named_by_the_flag_of_the_error(images, checkpoint):  # noqa: F811
    folder, rows = images
    wide = [(file, f"{label},{k}") for k, (file, label) in enumerate(rows)]
    path = write_csv(folder, wide, "image,species,number\n")
    message = refusal(path, checkpoint)
    assert "species, number" in message and flags(message) == {"data.label_key": "NAME"}
    assert chosen(path, checkpoint, **{"data.label_key": "species"})["batch_size"] > 1
    message = refusal(write_csv(folder, rows, "picture,species\n"), checkpoint)
    assert message.endswith("call the column of files 'file'")
    assert chosen(write_csv(folder, rows, "file,species\n"), checkpoint)["batch_size"] > 1


def test_the_error_about_a_csv_without_rows_states_what_to_write(images, checkpoint):  # noqa: F811
    folder, _ = images
    for text in ("", "file,label\n"):
        assert refusal(write_csv(folder, [], text), checkpoint).endswith(
            "write a row FILE,LABEL for each image"
        )


def test_the_error_about_several_lists_in_a_folder_names_them(images, checkpoint):  # noqa: F811
    folder, rows = images
    write_csv(folder, rows).rename(folder / "first.csv")
    write_csv(folder, rows).rename(folder / "second.csv")
    message = refusal(folder, checkpoint)
    assert message.endswith(f"give {folder / 'first.csv'} or {folder / 'second.csv'}")
    assert chosen(folder / "first.csv", checkpoint)["data.source"] == "csv"


def test_a_csv_of_something_else_does_not_hide_folders_of_classes(tmp_path, checkpoint):  # noqa: F811
    pets = photographs(tmp_path / "pets", {"cat": 10, "dog": 10})
    (pets / "notes.csv").write_text("name,age\nTom,3\n")
    assert chosen(pets, checkpoint)["data.source"] == "folder"


@pytest.mark.parametrize("recipe", ["my_images", "my_images_unlabelled"])
def test_a_workdir_in_place_of_images_is_recognised_by_its_files(tmp_path, recipe):
    for name in ("config.json", "manifest.json"):
        (tmp_path / name).write_text("{}")
    config = read_config(recipe)
    config.data.path = str(tmp_path)
    with pytest.raises(
        UserError, match=f"is the workdir of a run: give the images .*--from={tmp_path}"
    ):
        settle(run_options(config), given_keys(config), tmp_path / "none", str)


def test_an_empty_folder_has_no_images(tmp_path, checkpoint):  # noqa: F811
    (tmp_path / "empty").mkdir()
    assert "has no images: give a folder with a folder of images" in refusal(
        tmp_path / "empty", checkpoint
    )


@pytest.mark.slow
def test_a_prepared_data_set_is_found_by_its_name_and_by_a_relative_path(
    tmp_path,
    checkpoint,  # noqa: F811
    monkeypatch,
):
    prepare("mnist", tmp_path, {"train": 40, "test": 8})
    monkeypatch.chdir(tmp_path)
    (folder,) = Path("mnist").iterdir()
    for path in (folder, Path(f"tfds:mnist:{tmp_path}")):
        values = chosen(path, checkpoint)
        assert (values["data.source"], values["data.train_split"]) == ("tfds", "train[:85%]")
        assert values["data.test_split"] == "test"


def test_a_model_has_the_checkpoint_of_its_name(tmp_path):
    with pytest.raises(UserError, match="hf://timm/vit_small_patch14_dinov2.lvd142m"):
        vit_jax.finetune(photographs(tmp_path / "pets", {"cat": 10, "dog": 10}), "DINOv2-S/14")


def recognised(path, name="finetune:dataset=cifar10", said=None, **changes):
    config = read_config(name)
    config.update_from_flattened_dict({"data.path": str(path)} | changes)
    recognise(config, given_keys(config), (said if said is not None else []).append)
    return config


@pytest.mark.parametrize(
    "name", ["finetune:dataset=cifar10", "finetune:dataset=folder", "quickstart"]
)
def test_a_path_is_recognised_for_any_source_in_the_config(tmp_path, name):
    pets, said = photographs(tmp_path / "pets", {"cat": 10, "dog": 10}), []
    start = {"finetune.checkpoint": "vit.npz"} if name.startswith("finetune") else {}
    config = recognised(pets, name, said, **start)
    assert (config.data.source, config.data.train_split, config.data.test_split) == (
        *("folder", "all[:80%]", "all[80%:]"),
    )
    assert any("--config.data.train_split='all[:80%]'" in line for line in said)
    check(config)
    splits = open_splits(config)
    assert (len(splits.train), len(splits.test)) == (16, 4)


def test_splits_that_a_path_has_are_those_of_the_run(tmp_path):
    for split in ("train", "val"):
        photographs(tmp_path / "pets" / split, {"cat": 4, "dog": 4})
    data = recognised(tmp_path / "pets").data
    assert (data.source, data.train_split, data.test_split) == ("folder", "train", "val")


def test_values_of_the_user_are_not_replaced_by_recognised_ones(tmp_path):
    pets, splits = (
        photographs(tmp_path / "pets", {"cat": 4, "dog": 4}),
        {"data.train_split": "all[:50%]"},
    )
    data = recognised(pets, **splits, **{"data.source": "tfds"}).data
    assert (data.source, data.train_split) == ("tfds", "all[:50%]")
    data = recognised(pets, **splits).data
    assert (data.source, data.train_split) == ("folder", "all[:50%]")


def test_a_split_that_is_chosen_has_no_images_of_the_users(tmp_path):
    pets = photographs(tmp_path / "pets", {"cat": 4, "dog": 4})
    with pytest.raises(
        UserError, match=r"in common, and --config.data.test_split was chosen: give both"
    ):
        recognised(pets, **{"data.train_split": "all[:90%]"})
    own = {"data.train_split": "all[:90%]", "data.test_split": "all[90%:]"}
    assert recognised(pets, **own).data.test_split == "all[90%:]"


def test_names_that_are_no_path_and_runs_without_labels_are_left_to_their_source(tmp_path):
    assert recognised("cifar100").data.path == "cifar100"
    photographs(tmp_path / "all", {"": 3, "may": 4})
    data = recognised(tmp_path / "all", "dinov2").data
    assert (data.source, data.train_split, data.test_split) == ("folder", "all[:80%]", "all[80%:]")


def test_a_plan_counts_the_images_of_any_path(tmp_path):
    pets = photographs(tmp_path / "pets", {"cat": 10, "dog": 10})
    assert data_set_size(run_options(recognised(pets)), None) == (16, 2)
    prepare("mnist", tmp_path, {"train": 40, "test": 8})
    config = recognised(f"tfds:mnist:{tmp_path}")
    config.data.num_classes = None
    assert data_set_size(run_options(config), None) == (40, 10)


def test_a_data_set_to_evaluate_on_needs_no_kind(tmp_path):
    pets = photographs(tmp_path / "pets", {"cat": 2, "dog": 2})
    prepare("mnist", tmp_path, {"train": 4, "test": 2})
    (mnist,) = (tmp_path / "mnist").iterdir()
    lists = write_csv(tmp_path, [("pets/cat/000.png", "cat")])
    for path, kind in ((pets, "folder"), (mnist, "tfds"), (lists, "csv")):
        assert data_set(f"{path}") == data_set(f"{kind}:{path}")
    assert data_set(f"{pets}@all[:50%],all[50%:]").test_split == "all[50%:]"


def test_images_that_a_csv_lists_are_predicted(images):
    folder, rows = images
    found = find_images([str(write_csv(folder, rows))])
    assert [found.path(index) for index in (0, 29)] == [
        f"{folder}/images/{k:03}.png" for k in (0, 29)
    ]
    assert len(found) == 30


def test_prepare_accepts_the_name_of_a_data_set_with_its_kind(tmp_path):
    prepare("mnist", tmp_path, {"train": 4})
    with pytest.raises(UserError, match="train on it as it is"):
        find(f"tfds:mnist:{tmp_path}")


def test_prepare_accepts_the_same_lists_as_finetune(images):
    folder, rows = images
    splits = {"train": rows[:20], "test": rows[20:]}
    table = [(file, f"{label},{split}") for split, part in splits.items() for file, label in part]
    one = write_csv(folder, table, "file,label,split\n").rename(folder / "split.csv")
    lists = folder / "lists"
    lists.mkdir()
    for name, part in splits.items():
        write_csv(lists, [(f"../{file}", label) for file, label in part]).rename(
            lists / f"{name}.csv"
        )
    whole = write_csv(folder, rows)
    for path, counts in (
        (whole, {"train": 30}),
        (one, {"train": 20, "test": 10}),
        (lists, {"train": 20, "test": 10}),
    ):
        done = prepared(find(str(path)), folder / "out", Options(), one_by_one, one_by_one)
        assert done.splits == counts and not done.skipped
        for split, count in counts.items():
            source = open_source("tfds", split, path=done.path)
            assert source.class_names == ("cat", "dog")
            found = [
                source.class_names[label] for k in range(count) for label in source.labels_of(k)
            ]
            part = splits[split] if len(counts) > 1 else rows
            assert sorted(found) == sorted(label for _, label in part)
    assert find(f"csv:{whole}").units == find(str(whole)).units


def test_prepare_names_its_own_flag_for_the_column_of_labels(images):
    folder, rows = images
    wide = [(file, f"{label},{k}") for k, (file, label) in enumerate(rows)]
    path = str(write_csv(folder, wide, "image,species,number\n"))
    with pytest.raises(UserError, match="name the label's column with --label_key=NAME"):
        find(path)
    assert find(path, label_key="species").class_names == ["cat", "dog"]


def test_duplicates_are_found_by_the_lists_of_a_folder(images):
    folder, rows = images
    shutil.copy(folder / rows[0][0], folder / "images" / "again.png")
    write_csv(folder, rows).rename(folder / "train.csv")
    write_csv(folder, [("images/again.png", "cat")]).rename(folder / "test.csv")
    (group,) = find_duplicates([str(folder)], 0.98, str).groups
    assert group.kind == "in several splits" and len(group.images) == 2


def test_duplicates_of_a_prepared_data_set_are_those_of_its_images(images):
    folder, rows = images
    done = prepared(
        find(str(write_csv(folder, rows))), folder / "out", Options(), one_by_one, one_by_one
    )
    for path, source in (
        (done.folder, "list.csv"),
        (done.folder.parent, "list.csv"),
        (done.folder.parents[1], "list.csv"),
        ("tfds:mnist", "a folder"),
    ):
        with pytest.raises(UserError, match=f"is a prepared data set: give .*{source}"):
            find_duplicates([str(path)], 0.98, str)


def one_by_one(tasks, what, unit) -> None:
    for task in tasks:
        task.function(*task.arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            dict(images=["a.png"]),
            "images is of type list, and must be the path .*train=.* takes arrays",
        ),
        (dict(images=np.zeros((2, 8, 8, 3))), "images is of type ndarray, and must be the path"),
        (dict(images=None), "images is of type NoneType"),
        (dict(checkpoint=3), "checkpoint is of type int, and must be the path"),
        (dict(workdir=3), "workdir is of type int, and must be the path"),
        (dict(minutes="ten"), "minutes is 'ten' and must be None or a finite number"),
        (dict(group=3), "groups is 3 and must be None or a text"),
        (dict(balance="half"), "balance is 'half' and must be none or sqrt or full"),
        (dict(values=["steps"]), "values is of type list, and must be a dict"),
        (dict(values="steps=3"), "values is of type str, and must be a dict"),
        (dict(values={3: 3}), "config key 3 is of type int"),
        (
            dict(values={"data": {"flip": False}}),
            "'data' is a section: give .* such as 'data.source'",
        ),
        (dict(values={"config.steps": 3}), "did you mean 'steps'"),
        (dict(on_log=3), "on_log is of type int, and must be a function"),
    ],
)
def test_errors_about_arguments_of_finetune_are_one_line(tmp_path, arguments, message):
    pets = photographs(tmp_path / "pets", {"cat": 10, "dog": 10})
    with pytest.raises(UserError, match=message) as caught:
        vit_jax.finetune(
            **dict(images=pets, checkpoint="none", workdir=tmp_path / "run") | arguments
        )
    assert "\n" not in str(caught.value)


def test_load_model_requires_a_path():
    with pytest.raises(UserError, match="is of type NoneType, and must be the path of a workdir"):
        vit_jax.load_model(None)  # pyright: ignore[reportArgumentType]


def test_advice_in_python_names_arguments_that_work(tmp_path, checkpoint):  # noqa: F811
    pets = photographs(tmp_path / "pets", {"cat": 8, "dog": 8, "fox": 1})
    with pytest.raises(UserError) as caught:
        vit_jax.finetune(pets, checkpoint, tmp_path / "run")
    assert "--" not in str(caught.value)
    (text,) = re.findall(r"values=(\{.*\})", str(caught.value))
    assert eval(text) == {"data.classes": ("cat", "dog")}
    assert chosen(pets, checkpoint, **eval(text))["data.classes"] == ("cat", "dog")


def test_advice_in_python_on_a_checkpoint_and_a_workdir(tmp_path, checkpoint, monkeypatch):  # noqa: F811
    pets = photographs(tmp_path / "pets", {"cat": 10, "dog": 10})
    with pytest.raises(UserError, match="contains files but no run; give a new or empty workdir"):
        vit_jax.finetune(pets, checkpoint, pets)
    for train in (vit_jax.finetune, vit_jax.pretrain):
        monkeypatch.setattr("vit_jax.interop.open.download", unreachable)
        with pytest.raises(UserError, match="give checkpoint='CHECKPOINT': a folder"):
            train(pets, workdir=tmp_path / "run")


def unreachable(source):
    raise UserError(f"cannot fetch {source}")


def test_a_head_without_class_names_has_indices_and_logs_a_line(tmp_path):
    model = vit_jax.create_model(
        "ViT-Ti/16", dim=16, depth=1, mlp_dim=32, heads=2, image_size=32, num_classes=7
    )
    for library in ("timm", "transformers"):
        folder = vit_jax.save_model(model, tmp_path / library, library=library, log=str)
        said = []
        assert open_classifier(str(folder), log=said.append).class_names == [*map(str, range(7))]
        assert sum("has no class names: classes are shown as indices" in line for line in said) == 1
        assert vit_jax.load_model(folder, log=str).about.class_names == ()


@pytest.mark.parametrize(
    "free, advice",
    [
        (2200, {"data.image_size": 16}),
        (1700, {"data.image_size": 8}),
        (900, {"finetune.train": "head"}),
        (90, {}),
    ],
)
@pytest.mark.slow
def test_too_little_memory_names_a_flag_with_which_a_step_fits(
    tmp_path,
    checkpoint,  # noqa: F811
    monkeypatch,
    free,
    advice,
):
    def needs(program, config, max_labels):
        state = 1000 if config.finetune.train == "all" else 100
        size = config.data.image_size * config.batch_size // config.micro_batches
        return Needs(state, 0, 0, 0, 16 * size if config.finetune.train == "all" else size)

    monkeypatch.setattr(micro_batches, "needs_of", needs)
    monkeypatch.setattr(micro_batches, "compiled_bytes", lambda *_: float("inf"))
    monkeypatch.setattr(micro_batches, "memory_of", lambda device: (free / micro_batches.FREE,) * 2)
    pets = photographs(tmp_path / "pets", {"cat": 10, "dog": 10})
    message = refusal(pets, checkpoint)
    assert message.startswith("not even 1 image of 32 pixels fits into") and "--from" in message
    found = {key: int(text) if text.isdecimal() else text for key, text in flags(message).items()}
    assert found == advice
    if advice:
        assert chosen(pets, checkpoint, **advice)["batch_size"] > 1
