"""VTAB-1k: 19 tasks with small copies of their TFDS data sets, and their labels."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from tensorflow_datasets.proto.tf_example_generated_pb2 import Example

from tests.data.prepared import BOX, png, prepare
from vit_jax import published
from vit_jax.data.decode import decode
from vit_jax.data.sources import open_source, vtab
from vit_jax.data.sources.vtab import TASKS, tfds_slices
from vit_jax.errors import UserError

SPLITS = {"train": 20, "validation": 20, "test": 20}

# The distance of a scene's nearest object and its class: the index of the last of 0, 8, 8.5, 9,
# 9.5, 10, 100 below the distance.
CLEVR = [
    (0.5, 0),
    (8.0, 0),
    (8.25, 1),
    (8.5, 1),
    (8.75, 2),
    (9.0, 2),
    (9.5, 3),
    (9.75, 4),
    (10.0, 4),
    (12, 5),
]
# Types and distances of a scene's objects and its class. Types 0 to 2 are vehicles.
KITTI = [
    ([], 3),
    ([(3, 2.0), (7, 5.0)], 3),
    ([(0, 8.0)], 0),
    ([(0, 30.0), (1, 5.0), (5, 1.0)], 0),
    ([(0, -1.0)], 0),
    ([(1, 8.5)], 1),
    ([(2, 20.0), (4, 1.0)], 1),
    ([(2, 20.5)], 2),
    ([(0, 90.0), (1, 70.0)], 2),
]


def clevr(number: int) -> dict:
    count, distance = 3 + number % 8, CLEVR[number % 10][0]
    rest = dict(color=0, material=0, shape=0, size=1, rotation=0.0) | {"3d_coords": [1.0, 2.0, 3.0]}
    distances = [distance + 3 * abs(i - number % count) for i in range(count)]
    return dict(objects=[rest | dict(pixel_coords=[1.0, 2.0, z]) for z in distances])


def kitti(number: int) -> dict:
    rest = dict(truncated=0.0, occluded=0, alpha=0.0, bbox=BOX, dimensions=[1.0] * 3)
    objects, _ = KITTI[number % 9]
    return dict(
        objects=[
            rest | dict(type=kind, location=[-50.0, 1.0, z], rotation_y=0.0) for kind, z in objects
        ]
    )


def dsprites(number: int) -> dict:
    bits = np.zeros((64, 64, 1), np.uint8)
    bits[0, :8, 0] = [number >> i & 1 for i in range(8)]
    return dict(image=png(bits), label_x_position=number % 32, label_orientation=number % 40)


EXAMPLES = {"clevr:3.*.*": clevr, "kitti:3.*.*": kitti, "dsprites:2.*.*": dsprites}
# The class of each of 40 orientations. A class has 2.5 orientations.
ORIENTATIONS = np.repeat(np.arange(16), [3, 2] * 8)
LABELS = {
    "clevr-count": lambda number: number % 8,
    "clevr-dist": lambda number: CLEVR[number % 10][1],
    "kitti-dist": lambda number: KITTI[number % 9][1],
    "dspr-loc": lambda number: number % 32 // 2,
    "dspr-ori": lambda number: ORIENTATIONS[number % 40],
}


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vtab")
    for dataset in {task.dataset: None for task in TASKS.values()}:
        prepare(dataset, folder, SPLITS, EXAMPLES.get(dataset, lambda number: {}))
    return folder


@pytest.fixture
def few(monkeypatch):
    """Reduces the splits to 8 and 2 images instead of 800 and 200."""
    monkeypatch.setattr(vtab, "IMAGES", {"train": 8, "val": 2, "test": None})


def number_of(image, name: str) -> int:
    """Returns the number of an example, which is stored in its pixels."""
    pixels = decode(image)
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[-1] == 3
    if name.startswith("dspr"):
        assert set(np.unique(pixels)) <= {0, 255}
        return int(np.packbits(pixels[0, :8, 0] == 255, bitorder="little")[0])
    assert (pixels == pixels[0, 0, 0]).all()
    return int(pixels[0, 0, 0])


@pytest.mark.parametrize("name", TASKS)
def test_task_opens_with_its_splits_and_labels(name, data_dir, few):
    numbers = {}
    for split in vtab.SPLITS:
        source = open_source("vtab", split, path=f"{name}:{data_dir}")
        assert len(source.class_names) == TASKS[name].classes
        numbers[split] = []
        for index in range(len(source)):
            image, (label,) = source[index]
            number = number_of(image, name)
            assert label == LABELS.get(name, lambda number: number % TASKS[name].classes)(number)
            numbers[split].append(number)
    train, val, test = (numbers[split] for split in ("train800", "val200", "test"))
    assert (len(train), len(val)) == (8, 2)
    assert numbers["train800val200"] == train + val
    assert len({*train, *val, *test}) == len(train) + len(val) + len(test)


# The sizes of TFDS's splits, and the slices for validation and testing in VTAB's code.
SLICES = {
    "caltech101": ({"train": 3059, "test": 6085}, "train[2753:2953]", "test[0:6085]"),
    "cifar-100": ({"train": 50000, "test": 10000}, "train[45000:45200]", "test[0:10000]"),
    "dtd": ({"train": 1880, "validation": 1880, "test": 1880}, "validation[0:200]", "test[0:1880]"),
    "pets": ({"train": 3680, "test": 3669}, "train[2944:3144]", "test[0:3669]"),
    "svhn": ({"train": 73257, "test": 26032}, "train[65931:66131]", "test[0:26032]"),
    "eurosat": ({"train": 27000}, "train[16200:16400]", "train[21600:27000]"),
    "resisc45": ({"train": 31500}, "train[18900:19100]", "train[25200:31500]"),
    "clevr-dist": (
        {"train": 70000, "validation": 15000},
        "train[63000:63200]",
        "validation[0:15000]",
    ),
    "dspr-ori": ({"train": 737280}, "train[589824:590024]", "train[663552:737280]"),
    "snorb-elev": ({"train": 24300, "test": 24300}, "test[0:200]", "test[12150:24300]"),
}


@pytest.mark.parametrize("name", SLICES)
def test_splits_are_the_benchmarks(name):
    sizes, val, test = SLICES[name]
    task = TASKS[name]
    assert tfds_slices(task, "train800", sizes) == "train[0:800]"
    assert tfds_slices(task, "val200", sizes) == val
    assert tfds_slices(task, "train800val200", sizes) == f"train[0:800]+{val}"
    assert tfds_slices(task, "test", sizes) == test


def test_tasks_are_those_of_the_paper():
    table = published.table("table9")
    assert [task.name for task in TASKS.values()] == list(table.rows)
    groups = [task.group for task in TASKS.values()]
    assert groups == ["natural"] * 7 + ["specialized"] * 4 + ["structured"] * 8


def test_flips_and_crops_that_change_the_label_are_disabled():
    no_flip = {name for name, task in TASKS.items() if not task.flip}
    no_crop = {name for name, task in TASKS.items() if not task.crop}
    assert no_flip == {"dspr-ori", "snorb-azim", "dspr-loc"}
    assert no_crop == {"clevr-count", "clevr-dist", "dmlab", "kitti-dist", "dspr-loc"}


def test_orientations_of_dsprites_fill_sixteen_classes():
    def label(orientation: int) -> int:
        features = Example().features.feature
        features["label_orientation"].int64_list.value.append(orientation)
        return TASKS["dspr-ori"].label(features)

    assert [label(i) for i in range(40)] == ORIENTATIONS.tolist()


def test_damaged_image_of_dsprites_is_returned_unchanged():
    assert vtab.black_and_white(b"no image") == b"no image"


def test_source_can_be_sent_to_another_process(data_dir, few):
    source = open_source("vtab", "train800", path=f"dspr-loc:{data_dir}")
    image, labels = pickle.loads(pickle.dumps(source))[0]
    np.testing.assert_array_equal(image, source[0].image)
    assert labels == source[0].labels


def test_unknown_task_names_the_nearest():
    with pytest.raises(UserError, match="no task 'clever-count'.*did you mean 'clevr-count'"):
        open_source("vtab", "test", path="clever-count")


def test_unknown_split_lists_the_four(data_dir):
    with pytest.raises(
        UserError, match="no split 'validation'; there are: train800, val200, train800val200"
    ):
        open_source("vtab", "validation", path=f"dtd:{data_dir}")


@pytest.mark.parametrize(
    "name, command",
    [
        ("caltech101", "tfds build caltech101 --file_format=array_record --data_dir=[^ ]*$"),
        ("sun397", "tfds build sun397/tfds --file_format"),
        (
            "resisc45",
            "tfds build resisc45 .* --manual_dir=DIR, .*/datasets/catalog/resisc45 downlo",
        ),
        (
            "retinopathy",
            "tfds build diabetic_retinopathy_detection/btgraham-300 .* --manual_dir=DIR",
        ),
    ],
)
def test_error_of_a_missing_data_set_contains_the_command(name, command, tmp_path):
    with pytest.raises(
        UserError, match=f"is not prepared in .*; with tensorflow installed, run: {command}"
    ):
        open_source("vtab", "test", path=f"{name}:{tmp_path}")


def test_data_set_too_small_is_named(data_dir):
    with pytest.raises(UserError, match="takes 800 images of train of 'dtd.*', which has 20"):
        open_source("vtab", "train800", path=f"dtd:{data_dir}")


def test_data_set_without_a_split_is_named():
    with pytest.raises(UserError, match="'clevr.*' has no split 'validation'; there are: train"):
        tfds_slices(TASKS["clevr-count"], "test", {"train": 10})


def test_data_set_of_other_classes_is_named(data_dir, monkeypatch):
    other = TASKS["dtd"]._replace(dataset="svhn_cropped")
    monkeypatch.setitem(TASKS, "dtd", other)
    with pytest.raises(UserError, match="'svhn_cropped/3.1.0' has 10 classes, VTAB's DTD 47"):
        open_source("vtab", "test", path=f"dtd:{data_dir}")
