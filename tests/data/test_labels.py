"""Labels in all forms: indices, names, one-hot rows, other numberings, and missing labels."""

import io
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python import array_record_module
from PIL import Image
from tensorflow_datasets.proto.tf_example_generated_pb2 import Example as Message

from tests.data.test_prepare import make_webdataset, prepare, read
from vit_jax.command import read_config
from vit_jax.data.sources import handed_in, open_handed_in, open_source
from vit_jax.errors import UserError
from vit_jax.runs.splits import open_splits

CLASSES = ("cat", "dog", "fox")
NUMBERS = np.array([0, 1, 2, 1, 2, 0])  # Indices in CLASSES.
IMAGES = np.arange(6, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
ONE_HOT = [
    [1, 0, 0],
    [0, 1, 0],
    [0, 0, 1],
    [0, 1, 0],
    [0, 0, 1],
    [1, 0, 0],
]  # The one-hot form of NUMBERS.


class Items:
    """A data set like those of torch, with `classes`, and `targets` that may differ from items."""

    def __init__(self, classes, labels, targets=None):
        self.classes, self.labels = classes, labels
        if targets is not None:
            self.targets = targets

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return IMAGES[index % 6], self.labels[index]


def labels_of(source):
    table = source.label_table().tolist()
    assert [source.labels_of(i) for i in range(len(source))] == [
        source[i].labels for i in range(len(source))
    ]
    assert [[x for x in row if x >= 0] for row in table] == [
        list(source[i].labels) for i in range(len(source))
    ]
    return [source[i].labels for i in range(len(source))]


SINGLE = [(number,) for number in NUMBERS.tolist()]


@pytest.mark.parametrize(
    "labels",
    [
        NUMBERS,
        np.array(ONE_HOT),
        np.array(ONE_HOT, np.float32),
        np.array(ONE_HOT, bool),
        ONE_HOT,
        NUMBERS[:, None],
    ],
    ids=["indices", "int", "float", "bool", "list", "column"],
)
def test_one_hot_labels_are_their_classes(labels):
    for source in (
        handed_in((IMAGES, labels), "training"),
        handed_in(Items(CLASSES, list(labels)), "training"),
    ):
        assert labels_of(source) == SINGLE and source.max_labels == 1
        assert len(source.class_names) == 3


def test_one_hot_tensors_are_their_classes():
    torch = pytest.importorskip("torch")
    assert labels_of(handed_in((IMAGES, torch.tensor(ONE_HOT)), "training")) == SINGLE


def test_one_hot_rows_of_two_classes_are_no_lists_of_both():
    source = handed_in((IMAGES, [[1, 0], [0, 1], [0, 1], [1, 0], [0, 1], [1, 0]]), "training")
    assert labels_of(source) == [(0,), (1,), (1,), (0,), (1,), (0,)]
    # With three classes, the rows are lists of classes.
    source = handed_in((IMAGES[:2], [[1, 0], [0, 1]]), "test", class_names=CLASSES)
    assert labels_of(source) == [(1, 0), (0, 1)]


def test_multi_hot_rows_are_the_classes_of_their_ones():
    rows = [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    source = handed_in((IMAGES, rows), "training")
    assert labels_of(source) == [(0, 1), (2,), (), (1, 2), (0,), (0,)]
    assert source.class_names == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (np.full((6, 3), 1 / 3), "example 0: .*probabilities are not supported"),
        ([[0, 2, 0], [1, 0, 0]] * 3, r"the label \[0, 2, 0\] is neither a list"),
        (np.eye(4, dtype=int)[NUMBERS], "nor a row of 3 zeros and ones"),
        ([0, 1, None, 2, 1, 0], "example 2: it has no label"),
        ([0, 1, 3, 2, 1, 0], "a label 3, outside the 3 classes"),
        (["cat", 1, 2, "dog", 1, 1], "both numbers and names"),
        (NUMBERS.astype(float), "give whole numbers"),
    ],
)
def test_labels_of_no_class_are_refused(labels, says):
    with pytest.raises(UserError, match=says):
        handed_in(Items(CLASSES, list(labels)), "training")


def test_labels_of_items_have_precedence_over_targets():
    """This data set merges two classes, but does not update `targets`."""
    merged = np.minimum(NUMBERS, 1).tolist()
    source = handed_in(Items(("cat", "other"), merged, NUMBERS.tolist()), "training")
    assert labels_of(source) == [(number,) for number in merged]


def test_an_item_that_changes_its_label_is_refused_when_it_is_read():
    data = Items(CLASSES, NUMBERS.tolist() * 20, NUMBERS.tolist() * 20)
    source = handed_in(data, "training")
    data.labels[77] = 2 - data.labels[77]
    data.labels[77] -= data.labels[77] == data.targets[77]
    with pytest.raises(UserError, match="example 77: its label is now"):
        source[77]


@pytest.mark.parametrize(
    ("classes", "labels"),
    [
        (("fox", "dog", "cat"), [2 - number for number in NUMBERS]),
        (("dog", "fox"), [0, 1, 0, 1, 0, 1]),
        (("yak", "cat", "dog", "fox"), [number + 1 for number in NUMBERS]),
    ],
    ids=["other order", "lacks the first", "one more without images"],
)
def test_classes_of_test_data_are_matched_by_name(classes, labels):
    data = Items(classes, labels)
    expected = [(CLASSES.index(classes[label]),) for label in labels]
    for given in (data, handed_in(data, "own")):  # As the data set itself, and as a source.
        source = open_handed_in({"test": given}, "test", class_names=CLASSES)
        assert (source.class_names, labels_of(source)) == (CLASSES, expected)
        assert source.empty_classes == tuple(
            name for name in CLASSES if name not in {classes[i] for i in labels}
        )


def test_test_data_of_other_classes_are_refused():
    for data in (
        Items(("dog", "yak"), [0, 1, 1]),
        handed_in(Items(("dog", "yak"), [0, 1, 1]), "own"),
    ):
        with pytest.raises(
            UserError, match="that the training data do not have: yak; training has: cat, dog"
        ):
            handed_in(data, "test", class_names=CLASSES)


def test_parts_of_other_class_names_are_refused():
    """The data sets are joined as in torch's `ConcatDataset`, which keeps each part's numbers."""

    class Joined(Items):
        def __init__(self, *parts):
            self.datasets = parts
            self.labels = [label for part in parts for label in part.labels]

    first = Items(CLASSES, [0, 1, 2])
    assert handed_in(Joined(first, Items(CLASSES, [2, 1])), "training").class_names == CLASSES
    with pytest.raises(UserError, match="parts of the data have different class names"):
        handed_in(Joined(first, Items(CLASSES[::-1], [0, 1])), "training")


def test_numbers_without_names_are_those_of_training():
    assert labels_of(handed_in((IMAGES, NUMBERS), "test", class_names=CLASSES)) == SINGLE


def test_slices_of_some_classes_have_their_share_of_each():
    data = {"train": (np.repeat(IMAGES, 2, axis=0), np.repeat([0, 1, 2], 4))}
    source = open_handed_in(data, "train[:50%]", only=("2", "0"))
    assert sorted(labels_of(source)) == [(0,), (0,), (1,), (1,)]


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(IMAGES[number]).save(file, "PNG")
    return file.getvalue()


def write_records(path, features) -> str:
    """Writes six tf.Examples with features of ints, floats and bytes; returns the pattern of the
    file.
    """
    writer = array_record_module.ArrayRecordWriter(str(path / "train.array_record"), "group_size:1")
    for number in range(6):
        message = Message()
        for key, values in features(number).items():
            feature = message.features.feature[key]
            kind = {int: "int64_list", float: "float_list", bytes: "bytes_list"}[
                type(values[0]) if values else int
            ]
            getattr(feature, kind).value.extend(values)
        writer.write(message.SerializeToString())
    writer.close()
    return str(path / "*.array_record")


def records(path, labels, num_classes=3, key="label", **options):
    pattern = write_records(path, lambda number: {"image": [png(number)], key: labels[number]})
    return open_source("array_record", "train", path=pattern, num_classes=num_classes, **options)


def test_one_hot_labels_of_records_are_their_classes(tmp_path):
    source = records(tmp_path, ONE_HOT)
    assert labels_of(source) == SINGLE


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (
            [[b"cat"]] * 6,
            "example 0: the feature 'label' .* holds text or bytes, and must hold integers",
        ),
        ([[1.0]] * 6, "holds floats, and must hold integers"),
        ([[1]] * 5 + [[]], "example 5 has no label, and the objective needs one"),
        (
            [*ONE_HOT[:-1], [0, 7, 0]],
            "neither a list of class indices, .* nor a row of 3 zeros and ones",
        ),
        ([[1, 0, 0, 0], [0, 1, 0, 0]] * 3, "neither a list of class indices"),
    ],
)
def test_records_without_a_usable_label_are_refused_when_they_are_opened(tmp_path, labels, says):
    with pytest.raises(UserError, match=says):
        records(tmp_path, labels, each_labelled=True)


def test_error_of_a_missing_label_feature_lists_the_features(tmp_path):
    with pytest.raises(
        UserError, match=r"no feature 'label' .*: class/label \(integers\), image \(text"
    ):
        records(tmp_path, [[1]] * 6, key="class/label")
    source = open_source(
        "array_record", "train", path=f"{tmp_path}/*", num_classes=3, label_key="class/label"
    )
    assert source[0].labels == (1,)


def test_numbers_and_names_of_classes_are_not_mixed(tmp_path):
    records(tmp_path, [[number] for number in NUMBERS.tolist()])
    for name in CLASSES:
        (tmp_path / "pets" / "train" / name).mkdir(parents=True)
        (tmp_path / "pets" / "train" / name / "0.png").write_bytes(png(0))
    parts = (f"array_record:{tmp_path}/*.array_record", f"folder:{tmp_path}/pets")
    for split in ("train", "train[:90%]"):
        with pytest.raises(UserError, match="without class names, and .* with class names"):
            open_source("mixture", split, parts=parts, num_classes=3)
    assert len(open_source("mixture", "train", parts=parts[:1] * 2, num_classes=3)) == 12


def test_more_labels_than_are_kept_are_refused(tmp_path):
    with pytest.raises(UserError, match="has 17 labels; at most 16 are supported"):
        records(tmp_path, [list(range(17))] * 5 + [[3]], num_classes=20)


def test_an_image_without_a_label_is_refused_where_the_loss_needs_one():
    rows = [[1, 1, 0], [0, 0, 1], [0, 0, 0], [0, 1, 1], [1, 0, 0], [1, 0, 0]]
    config = read_config("configs/quickstart.py").copy_and_resolve_references()
    config.data.dev_split, config.data.train_split, config.data.test_split = None, "train", "train"
    with pytest.raises(
        UserError, match="1 of 6 training images have no label.*train data's example 2"
    ):
        open_splits(config, {"train": (IMAGES, rows)})
    config.loss.name = "sigmoid"
    assert labels_of(open_splits(config, {"train": (IMAGES, rows)}).train)[2] == ()


def parquet(path, split, names, labels):
    path.mkdir(exist_ok=True)
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    several = isinstance(labels[0], list)
    schema = pyarrow.schema(
        [
            ("image", pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])),
            ("label", pyarrow.list_(pyarrow.int64()) if several else pyarrow.int64()),
        ],
        metadata={"huggingface": json.dumps({"info": {"features": features if names else {}}})},
    )
    rows = [
        {"image": {"bytes": png(i), "path": f"{i}.png"}, "label": x} for i, x in enumerate(labels)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path / f"{split}.parquet")


def names_by_image(done, split):
    names = open_source("tfds", split, path=done.path, label_key=done.label_key).class_names
    return {image: [names[label] for label in labels] for image, labels in read(done, split)}


def test_parquet_files_of_other_class_names_are_matched_by_name(tmp_path):
    parquet(tmp_path / "pets", "train-00000-of-00002", ["cat", "dog"], [0, 1, 0])
    parquet(tmp_path / "pets", "train-00001-of-00002", ["fox", "dog"], [1, 0, 1])
    parquet(tmp_path / "pets", "test-00000-of-00001", ["fox", "cat", "yak"], [0, 1, 0])
    done = prepare(tmp_path / "pets", tmp_path / "out")
    assert names_by_image(done, "test") == {png(0): ["fox"], png(1): ["cat"], png(2): ["fox"]}
    source = open_source("tfds", "train", path=done.path)
    assert source.class_names == ("cat", "dog", "fox")
    assert sorted(labels_of(source)) == [(0,), (0,), (1,), (1,), (1,), (2,)]
    parquet(tmp_path / "pets", "test-00000-of-00001", ["fox", "cat", "yak"], [0, 2, 0])
    with pytest.raises(
        UserError, match="row 1: its class is not among those of the training files"
    ):
        prepare(tmp_path / "pets", tmp_path / "again")
    parquet(tmp_path / "pets", "test-00000-of-00001", None, [0, 2, 0])
    with pytest.raises(
        UserError, match="test-.* has no class names in its schema, and other files have"
    ):
        prepare(tmp_path / "pets", tmp_path / "again")


def test_one_hot_labels_are_prepared_as_their_classes(tmp_path):
    parquet(tmp_path / "pets", "train", None, ONE_HOT)
    done = prepare(tmp_path / "pets", tmp_path / "out")
    assert done.label_key == "label"
    assert names_by_image(done, "train") == {png(i): [str(x)] for i, x in enumerate(NUMBERS)}
    source = make_webdataset(
        tmp_path, lambda label: {"json": json.dumps({"label": [int(i == label) for i in range(3)]})}
    )
    done = prepare(source, tmp_path / "out")
    assert done.label_key == "label"
    assert {labels for _, labels in read(done, "train")} == {(0,), (1,), (2,)}


def test_multi_hot_labels_are_prepared_as_lists(tmp_path):
    parquet(tmp_path / "pets", "train", list(CLASSES), [[1, 1, 0], [0, 0, 1], [0, 0, 0]])
    done = prepare(tmp_path / "pets", tmp_path / "out")
    assert names_by_image(done, "train") == {png(0): ["cat", "dog"], png(1): ["fox"], png(2): []}
    parquet(tmp_path / "bad", "train", list(CLASSES), [[1, 1, 0, 0], [0, 0, 1, 0]])
    with pytest.raises(UserError, match="nor a row of 3 zeros and ones"):
        prepare(tmp_path / "bad", tmp_path / "out")


@pytest.mark.parametrize("names", [("0", "2", "3"), ("3", "0")])
def test_classes_that_are_numbers_are_matched_by_name(names):
    """As with torchvision's ImageFolder, if the test folder lacks a class."""
    train = Items(("0", "1", "2", "3"), [0, 1, 2, 3])
    test = Items(names, [*range(len(names))])
    opened = handed_in(test, "test", class_names=handed_in(train, "training").class_names)
    assert [opened[index].labels for index in range(len(names))] == [(int(x),) for x in names]
