"""Tests of the values that `finetune` chooses (data set, splits and groups), and of its errors."""

import copy
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from vit_jax.command import read_config
from vit_jax.config import given_keys, leaves, run_options
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.runs.assemble import assemble
from vit_jax.runs.choices import micro_batches, next_workdir, settle
from vit_jax.runs.choices.data_at import data_at, find_groups
from vit_jax.runs.choices.image_sizes import short_sides
from vit_jax.runs.probe_head import with_probe_head


def photographs(root, counts: dict[str, int], name="{:03}.png", size=(20, 24)):
    """Writes small random images, in a folder for each class."""
    rng = np.random.default_rng(0)
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = rng.integers(256, size=(*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / folder / name.format(number))
    return root


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Returns a folder in timm's format, with a small ViT for images of 32 pixels."""
    import vit_jax

    model = vit_jax.create_model(
        "ViT-Ti/16",
        patch_size=8,
        dim=16,
        depth=1,
        mlp_dim=32,
        heads=2,
        image_size=32,
        num_classes=5,
    )
    folder = tmp_path_factory.mktemp("checkpoint") / "vit"
    vit_jax.save_model(model, folder, library="timm")
    return folder


def chosen(path, checkpoint, said=None, **changes) -> dict:
    """Returns the values that are chosen for a data set."""
    config = read_config("my_images")
    named = {"data.path": str(path), "finetune.checkpoint": str(checkpoint)}
    config.update_from_flattened_dict(named | changes)
    lines = [] if said is None else said
    return dict(
        leaves(settle(run_options(config), given_keys(config), path.parent / "none", lines.append))
    )


@pytest.fixture(autouse=True)
def unknown_memory(monkeypatch):
    """Makes the device's memory unknown, so that no micro-batches are chosen."""
    monkeypatch.setattr(micro_batches, "memory_of", lambda device: (None, 0.0))


def test_class_folders_are_cut_into_three_splits(tmp_path, checkpoint):
    said = []
    values = chosen(photographs(tmp_path / "pets", {"cat": 60, "dog": 40}), checkpoint, said)
    assert values["data.source"] == "folder"
    assert (values["data.train_split"], values["data.dev_split"]) == ("all[:70%]", "all[70%:85%]")
    assert values["data.test_split"] == "all[85%:]"
    assert values["finetune.head"] == "probe" and values["checkpoint.final"] == "best"
    assert values["batch_size"] == 16 and values["data.image_size"] == 32
    assert any("--config.data.image_size=32" in line and "20 pixels" in line for line in said)


def test_the_reason_of_slices_states_how_they_are_cut(tmp_path, checkpoint):
    photos, said = photographs(tmp_path / "pets", {"cat": 60, "dog": 40}), []
    for slices in ("stratified", "hashed"):
        chosen(photos, checkpoint, said, **{"data.slices": slices})
    for words in ("with the share of each class", "by the hashes of their paths"):
        assert sum(words in line for text in said for line in text.splitlines()) == 1


def test_images_with_several_labels_are_counted(tmp_path, checkpoint):
    said, folder = [], photographs(tmp_path / "cells", {"cat": 30, "dog": 30})
    files = sorted(folder.rglob("*.png"))
    rows = [f"{file.relative_to(folder)},{file.parent.name}\n" for file in files]
    again = [row.replace(",cat", ",dog") for row in rows[:20]]  # Contradictory labels.
    (folder / "list.csv").write_text("".join([*rows, *again]))
    values = chosen(folder / "list.csv", checkpoint, said)
    assert values["loss.name"] == "sigmoid" and values["finetune.head"] == "new"
    assert any(re.search(r"may have 2 labels: \d+ of 42 have several, such as", x) for x in said)


def test_unsupported_crop_of_a_checkpoint_is_replaced(tmp_path, checkpoint):
    said, other = [], shutil.copytree(checkpoint, tmp_path / "vit")
    config = json.loads((other / "config.json").read_text())
    config["pretrained_cfg"] |= {"crop_mode": "border", "crop_pct": 1.0}
    (other / "config.json").write_text(json.dumps(config))
    values = chosen(photographs(tmp_path / "pets", {"cat": 6, "dog": 6}), other, said)
    assert (values["data.test_crop"], values["data.test_resize"]) == ("short_side", 37)
    assert any("unsupported: crop_mode=border" in line for line in said)


@pytest.mark.parametrize(
    "folders, splits",
    [
        (("train", "val", "test"), ("train", "val", "test")),
        (("Training", "validation"), ("train[:85%]", "train[85%:]", "validation")),
        (("train", "test"), ("train[:85%]", "train[85%:]", "test")),
        (("train",), ("train[:70%]", "train[70%:85%]", "train[85%:]")),
    ],
)
def test_existing_splits_are_used(tmp_path, checkpoint, folders, splits):
    for folder in folders:
        photographs(tmp_path / "pets" / folder, {"cat": 20, "dog": 20})
    values = chosen(tmp_path / "pets", checkpoint)
    assert tuple(values[f"data.{name}_split"] for name in ("train", "dev", "test")) == splits


def test_values_of_the_user_take_precedence(tmp_path, checkpoint):
    folder = photographs(tmp_path / "pets", {"cat": 20, "dog": 20})
    said = []
    values = chosen(folder, checkpoint, said, batch_size=4, steps=5, **{"data.image_size": 16})
    assert (values["batch_size"], values["steps"], values["data.image_size"]) == (4, 5, 16)
    assert any("--config.steps" in line and line.endswith("yours") for line in said)


def test_a_csv_is_recognised_alone_and_in_its_folder(tmp_path, checkpoint):
    folder = photographs(tmp_path / "cells", {"images": 30})
    rows = "".join(f"images/{k:03}.png,{'good' if k % 3 else 'bad'}\n" for k in range(30))
    (folder / "cells.csv").write_text(f"file,label\n{rows}")
    for path in (folder / "cells.csv", folder):
        values = chosen(path, checkpoint)
        assert values["data.source"] == "csv" and values["data.train_split"] == "all[:60%]"
        assert values["data.path"] == str(folder / "cells.csv")


def test_groups_in_file_names_stay_in_one_split(tmp_path, checkpoint):
    folder = tmp_path / "views"
    for cup in range(12):
        photographs(folder, {"cup" if cup % 2 else "jar": 4}, name=f"thing{cup}_view{{}}.png")
    said = []
    values = chosen(folder, checkpoint, said)
    assert any("12 groups" in line for line in said)
    parts = []
    for split in ("train", "dev", "test"):
        source = open_source(
            "folder", values[f"data.{split}_split"], path=str(folder), groups=values["data.groups"]
        )
        parts.append({name.split("_")[0] for name, _ in source.stored_files()})
    assert sum(map(len, parts)) == 12 and len(set.union(*parts)) == 12


def test_linear_probe_is_validated_on_other_groups_also_of_chosen_classes(tmp_path, checkpoint):
    """Images of a group are equal, so that folds that divide groups would have a lower loss."""
    for number in range(24):
        place = tmp_path / "views" / ("cup", "jar")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(256, size=(32, 32, 3), dtype=np.uint8)
        for view in range(3):
            Image.fromarray(pixels).save(place / f"thing{number}_view{view}.png")
    config, lines = read_config("my_images"), {}
    config.update_from_flattened_dict(chosen(tmp_path / "views", checkpoint))
    assert config.data.groups
    for classes in (None, ("cup", "jar")):
        config.data.classes = classes
        parts = assemble(run_options(config))
        lines[classes] = []
        with_probe_head(parts, parts.origin.read(), lines[classes].append)
    assert lines[None] == lines["cup", "jar"] and "linear probe" in lines[None][-1]


def test_names_of_classes_in_file_names_are_no_groups(tmp_path, checkpoint):
    """Groups by class name would test on classes that are not in the training split."""
    for name in "abcd":
        photographs(tmp_path / "crops", {name: 20}, name=f"{name}_frame_{{:03}}.png")
    assert chosen(tmp_path / "crops", checkpoint)["data.groups"] is None


def test_folders_that_seem_to_be_splits_are_not_classes(tmp_path, checkpoint):
    for name in ("learn", "hold"):
        photographs(tmp_path / "pets" / name, {"cat": 12, "dog": 12})
    with pytest.raises(
        UserError, match="two ways: as the classes hold, learn, or as splits .* cat"
    ):
        chosen(tmp_path / "pets", checkpoint)


def test_a_csvs_own_splits_are_used_and_its_rows_counted(tmp_path, checkpoint):
    folder, rows = photographs(tmp_path / "cells", {"images": 60}), ["file,label,split"]
    splits = ["train"] * 6 + ["val"] * 2 + ["test", ""]
    for k in range(60):
        rows.append(f"images/{k:03}.png,{'good' if k % 3 else 'bad'},{splits[k % 10]}")
    (folder / "cells.csv").write_text("\n".join(rows))
    said = []
    values = chosen(folder / "cells.csv", checkpoint, said)
    assert [values[f"data.{name}_split"] for name in ("train", "dev", "test")] == [
        *("train", "val", "test")
    ]
    assert any("36 of train, 12 of val, 6 of test, 6 of no split" in line for line in said)


def test_the_resize_before_a_square_crop_is_the_checkpoints(tmp_path, checkpoint):
    file = shutil.copytree(checkpoint, tmp_path / "square") / "config.json"
    config = json.loads(file.read_text())
    config["pretrained_cfg"] |= dict(crop_mode="squash", crop_pct=0.8)
    file.write_text(json.dumps(config))
    folder = photographs(tmp_path / "pets", {"cat": 20, "dog": 20})
    values = chosen(folder, tmp_path / "square")
    assert (values["data.test_crop"], values["data.test_resize"]) == ("square", 40)


@pytest.mark.parametrize(
    "names, groups",
    [
        ([f"a/patient{k // 5}_{k}.png" for k in range(40)], 8),
        ([f"a/IMG_{k:04}.jpg" for k in range(40)], None),
        ([f"a/cat.{k}.jpg" for k in range(40)], None),
        ([f"a/{k // 4}-crop{k % 4}.jpg" for k in range(40)], 10),
        ([f"a/{k}-crop0.jpg" for k in range(40)], None),
    ],
)
def test_groups_are_found_only_in_names_that_contain_them(names, groups):
    found = find_groups(None, names)
    assert (found and found[1]) == groups


def test_letters_are_not_mirrored(tmp_path, checkpoint):
    letters = chosen(photographs(tmp_path / "letters", {"b": 10, "d": 10, "p": 10}), checkpoint)
    digits = chosen(photographs(tmp_path / "digits", {str(k): 3 for k in range(10)}), checkpoint)
    animals = chosen(photographs(tmp_path / "animals", {"bat": 10, "dog": 10}), checkpoint)
    assert (letters["data.flip"], digits["data.flip"], animals["data.flip"]) == (False, False, True)


def test_a_shorter_time_has_fewer_steps(tmp_path, checkpoint, monkeypatch):
    from vit_jax.runs.choices import finetuning

    monkeypatch.setattr(finetuning, "flops_per_second", lambda: 1e7)
    folder = photographs(tmp_path / "pets", {"cat": 60, "dog": 40})
    monkeypatch.setattr(finetuning, "_forward_seconds", lambda checkpoint, size: 0.1)
    long, short = (chosen(folder, checkpoint, minutes=minutes) for minutes in (1000.0, 4.0))
    assert (long["steps"], long["evaluate_every"], long["early_stopping"]) == (132, 16, 4)
    # 4 minutes leave 0.85 x 240 s - 30 s = 174 s, which is 1,740 forward passes of 0.1 s. Of these,
    # 115 are needed before and after training, and 15 for each of 8 evaluations.
    assert (short["steps"], short["early_stopping"]) == (
        int((1740 - 70 - 15 - 2 * 15 - 8 * 15) / (3.2 * 16)),
        9,
    )
    assert short["optimizer.learning_rate"] == pytest.approx(
        5e-5 * (16 / 32 * short["steps"] / 100) ** 0.5, 0.02
    )


@pytest.mark.parametrize(
    "counts, message",
    [
        (
            {"cat": 30, "dog": 30, "fox": 1},
            r"1 image of the class fox.*data.classes=\"\('cat', 'dog'\)\"",
        ),
        ({"cat": 1, "dog": 1}, "2 images in all"),
    ],
)
def test_too_few_images_are_refused(tmp_path, checkpoint, counts, message):
    with pytest.raises(UserError, match=message):
        chosen(photographs(tmp_path / "pets", counts), checkpoint)


def test_errors_about_unrecognised_data_state_what_to_give(tmp_path):
    loose = photographs(tmp_path, {"loose": 3}) / "loose"
    for path, message in (
        (tmp_path / "nothing", "there is no .*: give a folder"),
        (loose, "has 3 images and no folders of classes: .*; without labels, vit-jax pretrain"),
        (loose / "000.png", "is neither a folder nor a CSV"),
    ):
        with pytest.raises(UserError, match=message):
            data_at(str(path))


def test_the_error_without_a_checkpoint_and_network_states_what_to_give(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    config = read_config("my_images")
    config.data.path = str(photographs(tmp_path / "pets", {"cat": 20, "dog": 20}))
    with pytest.raises(UserError, match=r"the default cannot be fetched .*give --from=CHECKPOINT"):
        settle(run_options(config), given_keys(config), tmp_path / "none", str)


def test_sides_of_images_are_read_from_their_headers(tmp_path):
    photographs(tmp_path / "pets", {"cat": 2, "dog": 2}, size=(20, 24))
    photographs(tmp_path / "pets", {"fox": 1}, size=(90, 30))
    assert (
        short_sides(open_source("folder", "all", path=str(tmp_path / "pets"))) == "20 to 30 pixels"
    )


def test_a_run_has_the_first_free_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert next_workdir("/data/my pets/") == "runs/my_pets-1"
    (tmp_path / "runs" / "my_pets-1").mkdir(parents=True)
    assert next_workdir("/data/my pets") == "runs/my_pets-2"
    assert next_workdir("tfds:cifar100") == "runs/cifar100-1"
    assert next_workdir("cells/cells.csv") == "runs/cells-1"


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_split_into_micro_batches(tmp_path, checkpoint, monkeypatch):
    folder = photographs(tmp_path / "pets", {"cat": 60, "dog": 40})
    needed = {}

    def compiled(program, config, max_labels):
        """Returns the compiled step's memory, compiling once for each number of micro-batches."""
        if config.micro_batches not in needed:
            needed[config.micro_batches] = memory_compiled(program, config, max_labels)
        return needed[config.micro_batches]

    memory_compiled = micro_batches.compiled_bytes
    monkeypatch.setattr(micro_batches, "compiled_bytes", compiled)
    monkeypatch.setattr(
        micro_batches, "TAKEN", 20
    )  # A small model's program needs much more memory than its activations.
    config = read_config("my_images")
    config.update_from_flattened_dict(chosen(folder, checkpoint))
    parts = assemble(run_options(config))
    whole = compiled(parts.program, parts.config, 1)
    for share, micro in ((1.01, 1), (0.99, 2)):
        there = share * whole / micro_batches.FREE
        monkeypatch.setattr(micro_batches, "memory_of", lambda device, there=there: (there, there))
        values = chosen(folder, checkpoint)
        assert (values["batch_size"], values["micro_batches"], values["model.remat"]) == (
            16,
            micro,
            "none",
        )
    monkeypatch.setattr(micro_batches, "memory_of", lambda device: (1e5, 1e5))
    with pytest.raises(
        UserError, match="not even 1 image of 32 pixels .* give a smaller model with --from"
    ):
        chosen(folder, checkpoint)


def test_a_value_of_the_user_is_kept_also_if_the_config_file_has_it(tmp_path, checkpoint):
    said = []
    folder = photographs(tmp_path / "pets", {"cat": 60, "dog": 40})
    assert read_config("my_images").finetune.head == "new"
    values = chosen(
        folder, checkpoint, said, **{"finetune.head": "new", "optimizer.learning_rate": 0.003}
    )
    assert (values["finetune.head"], values["optimizer.learning_rate"]) == ("new", 0.003)
    lines = [line.split() for line in said]
    assert ["--config.finetune.head='new'", "yours"] in lines
    assert ["--config.optimizer.learning_rate=0.003", "yours"] in lines


@pytest.mark.parametrize(
    "copied", [lambda config: config.copy_and_resolve_references(), copy.deepcopy]
)
def test_a_copy_of_a_config_records_which_values_are_the_users(copied):
    config = read_config("my_images")
    config.data.path = "pets"
    config.finetune.head = "new"
    assert given_keys(copied(config)) == given_keys(config) == {"data.path", "finetune.head"}
    assert given_keys(copied(read_config("my_images"))) == set()


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({"data.train_split": "all[:90%]"}, "dev"),
        ({"data.test_split": "all[60%:]"}, "dev"),
        ({"data.dev_split": "all[:20%]"}, "train"),
    ],
)
def test_a_split_of_the_users_shares_no_images_with_one_that_is_chosen(
    tmp_path, checkpoint, own, other
):
    folder = photographs(tmp_path / "pets", {"cat": 60, "dog": 40})
    with pytest.raises(
        UserError, match=rf"has images of data.{other}_split=.*: give all of --config.data"
    ):
        chosen(folder, checkpoint, **own)
    apart = {"train": "all[:50%]", "dev": "all[50%:60%]", "test": "all[60%:]"}
    values = chosen(
        folder, checkpoint, **{f"data.{name}_split": split for name, split in apart.items()}
    )
    assert {name: values[f"data.{name}_split"] for name in apart} == apart
