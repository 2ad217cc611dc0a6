"""Slices that keep the images of a group together, and slices in the order of the source."""

import numpy as np
import pytest
from PIL import Image

from vit_jax.command import read_config
from vit_jax.data.sources import open_handed_in, open_source
from vit_jax.errors import UserError
from vit_jax.interface import train
from vit_jax.runs.splits import notes, open_splits

SIZES = [1, 7, 3, 5, 2, 6, 4, 4, 5, 3]  # The number of images of each patient. The sum is 40.
PATIENTS = [f"p{number}" for number, size in enumerate(SIZES) for _ in range(size)]
CLASSES = [("cat", "dog")[int(name[1:]) % 2] for name in PATIENTS]
IMAGES = np.arange(40, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
SPLITS = ("all[:50%]", "all[50%:][:60%]", "all[50%:][60%:]")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Returns a folder with images in folders of classes, and a CSV of them with their patients."""
    root = tmp_path_factory.mktemp("groups")
    rows = ["file,label,patient"]
    for number, (patient, name) in enumerate(zip(PATIENTS, CLASSES, strict=True)):
        file = root / "pets" / name / f"{patient}_{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(IMAGES[number]).save(file)
        rows.append(f"pets/{name}/{file.name},{name},{patient}")
    (root / "all.csv").write_text("\n".join(rows))
    return root


def assert_whole_groups(parts):
    """Asserts that each patient is in one part and that the parts have nearly the right sizes.

    All images are in one of the parts.
    """
    patients = [{PATIENTS[number] for number in part} for part in parts]
    assert sorted(number for part in parts for number in part) == list(range(40))
    assert sum(map(len, patients)) == len(SIZES)
    for part, expected in zip(parts, (20, 12, 8), strict=True):
        assert abs(len(part) - expected) <= max(SIZES)


@pytest.mark.parametrize("slices", ["stratified", "in_order"])
@pytest.mark.parametrize(
    ("kind", "path", "groups"),
    [
        ("folder", "pets", "/(p[0-9]+)_"),
        ("folder", "pets", "p[0-9]+_"),
        ("csv", "all.csv", "Patient"),
        ("csv", "all.csv", r"(p\d+)_"),
    ],
)
def test_a_group_is_in_one_slice(root, kind, path, groups, slices):
    parts = []
    for split in SPLITS:
        source = open_source(kind, split, path=str(root / path), groups=groups, slices=slices)
        parts.append([int(source.describe(i)[-6:-4]) for i in range(len(source))])
        present = {source.labels_of(i) for i in range(len(source))}
        assert present == {(0,), (1,)} or slices == "in_order"
    assert_whole_groups(parts)


def test_a_slice_of_rows_without_labels_is_a_sample_too():
    parts = []
    for split in ("train[:50%]", "train[50%:]"):
        source = open_handed_in({"train": IMAGES}, split, labels=False)
        parts.append(sorted(int(source[i].image[0, 0, 0]) for i in range(len(source))))
    assert sorted(sum(parts, [])) == list(range(40))
    assert all(5 <= sum(number < 20 for number in part) <= 15 for part in parts)


class Rows:
    """A data set like those of Hugging Face, with a column of patients."""

    column_names = ["image", "label", "patient"]
    columns = {"label": CLASSES, "patient": PATIENTS}

    def __len__(self):
        return 40

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key]
        return {"image": IMAGES[key]} | {name: values[key] for name, values in self.columns.items()}


def test_a_group_of_data_that_are_handed_in_is_in_one_slice():
    for data, groups in (
        ((IMAGES, CLASSES), PATIENTS),
        ((IMAGES, CLASSES), np.array(PATIENTS)),
        (Rows(), "patient"),
    ):
        parts = []
        for split in SPLITS:
            source = open_handed_in({"train": data}, split.replace("all", "train"), groups=groups)
            parts.append([int(source[i].image[0, 0, 0]) for i in range(len(source))])
        assert_whole_groups(parts)


def test_slices_in_order_are_rows():
    for split, rows in (
        ("train[30:]", range(30, 40)),
        ("train[:25%]", range(10)),
        ("train[5:][:5]", range(5, 10)),
    ):
        source = open_handed_in({"train": (IMAGES, CLASSES)}, split, slices="in_order")
        assert [int(source[i].image[0, 0, 0]) for i in range(len(source))] == list(rows)
    source = open_source("digits", "train[100:]", slices="in_order")
    np.testing.assert_array_equal(source[0].image, open_source("digits", "train")[100].image)


def config_of(**values):
    config = read_config("configs/quickstart.py").copy_and_resolve_references().unlock()
    names = dict(
        source="handed_in", train_split="train[:75%]", dev_split=None, test_split="train[75%:]"
    )
    config.data.update(names | values)
    return config


def test_a_stratified_slice_of_rows_has_a_note():
    data = {"train": (IMAGES, CLASSES)}
    config = config_of()
    (note,) = notes(config, open_splits(config, data))
    assert note.startswith("note: train[:75%] is a sample of the 40 examples")
    assert notes(config, open_splits(config, data, PATIENTS), PATIENTS) == []
    config = config_of(slices="in_order")
    assert not any("a sample" in line for line in notes(config, open_splits(config, data)))


@pytest.mark.parametrize(
    ("kind", "path", "groups", "says"),
    [
        ("folder", "pets", "patient", "matches nothing in '.*': every image must have a group"),
        ("folder", "pets", "(p", "is not a regular expression"),
        ("folder", "pets", "p", "no complete group: there are 1 groups of 40 images"),
        ("digits", "", "p", "is unsupported for these data"),
        ("tfds", "cifar10", "p", "is unsupported with tfds"),
    ],
)
def test_unknown_groups_are_rejected(root, kind, path, groups, says):
    with pytest.raises(UserError, match=says):
        open_source(
            kind,
            "train[:9%]" if kind != "folder" else "all[:9%]",
            path=str(root / path),
            groups=groups,
        )


def test_invalid_or_unused_groups_are_rejected(tmp_path):
    with pytest.raises(UserError, match="groups has 3 entries, and train 40 examples"):
        open_handed_in({"train": (IMAGES, CLASSES)}, "train[:50%]", groups=PATIENTS[:3])
    with pytest.raises(UserError, match="there is no column 'patients'.*did you mean 'patient'"):
        open_handed_in({"train": Rows()}, "train[:50%]", groups="patients")
    for config in (config_of(train_split="train"), config_of(train_split="train", groups="p")):
        config.data.test_split = "test"
        groups = PATIENTS if config.data.groups is None else None
        with pytest.raises(UserError, match=r"train\[:90%\]"):
            train(config, tmp_path, train=(IMAGES, CLASSES), test=(IMAGES, CLASSES), groups=groups)
