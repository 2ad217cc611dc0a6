"""Sources of images: digits, folders, and TFDS data sets that are prepared here."""

import builtins
import io
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from vit_jax.data.sources import open_source
from vit_jax.data.sources.base import Example, Source, Subset, fingerprint, of_classes
from vit_jax.errors import UserError


def test_digits_are_split_as_promised():
    train, test = open_source("digits", "train"), open_source("digits", "test")
    assert (len(train), len(test)) == (1437, 360)
    everything = {
        example.image.tobytes()
        for source in (train, test)
        for example in map(source.__getitem__, range(len(source)))
    }
    assert len(everything) == 1797


def test_digits_are_rgb_pixels_of_full_range():
    source = open_source("digits", "train")
    image, (label,) = source[0]
    assert image.shape == (8, 8, 3) and image.dtype == np.uint8
    assert max(source[i].image.max() for i in range(20)) == 255
    assert source.class_names[label] == str(label)


def test_slices_follow_tfds():
    assert len(open_source("digits", "train[:10%]")) == 144
    rest = open_source("digits", "train[100:]")
    np.testing.assert_array_equal(rest[0].image, open_source("digits", "train")[100].image)


@pytest.mark.parametrize("split", ["train[:10x]", "train[5", "train[:0]"])
def test_bad_slice_is_named(split):
    with pytest.raises(UserError) as error:
        open_source("digits", split)
    assert split in str(error.value)


def test_unknown_split_lists_the_real_ones():
    with pytest.raises(UserError, match="'dev'; there are: test, train"):
        open_source("digits", "dev")


@pytest.fixture
def folder(tmp_path) -> Path:
    forms = {"a.jpg": "JPEG", "b.PNG": "PNG", "c.webp": "WEBP", "deep/d.jpeg": "JPEG"}
    for split, classes in {"train": ("cat", "ant", "fox"), "test": ("fox", "ant")}.items():
        for shade, name in enumerate(classes):
            for file, form in forms.items():
                path = tmp_path / split / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (9, 7), (shade * 80,) * 3).save(path, form)
            (tmp_path / split / name / "notes.txt").write_text("not an image")
    return tmp_path


def test_folder_finds_all_image_files_and_no_other(folder):
    source = open_source("folder", "train", path=str(folder))
    assert len(source) == 12
    assert source.class_names == ("ant", "cat", "fox")
    for index in range(12):
        image, (label,) = source[index]
        assert Image.open(io.BytesIO(image)).size == (9, 7)
        assert f"/{source.class_names[label]}/" in source.describe(index)


def test_labels_of_a_folder_are_known_without_its_files(folder):
    source = open_source("folder", "train", path=str(folder))
    for file in folder.rglob("*.*"):
        file.unlink()
    assert source.label_table().tolist() == [[label] for label in range(3) for _ in range(4)]
    assert Subset(source, np.array([11, 0, 5])).label_table().tolist() == [[2], [0], [1]]


def test_subset_is_the_images_asked_for_in_their_order():
    source = open_source("digits", "train")
    some = Subset(source, [7, 3])
    assert (len(some), some.class_names) == (2, source.class_names)
    np.testing.assert_array_equal(some[1].image, source[3].image)
    assert (some[0].labels, some.describe(0)) == (source[7].labels, "digits train image 7")


def test_label_table_has_the_labels_of_all_images_and_reports_progress():
    class Unknown(Source):
        class_names = ("a", "b", "c")

        def __len__(self):
            return 600

        def __getitem__(self, index):
            return Example(b"", (index * index % 3,))

    for source, expected in (
        (Unknown(), [256, 512, 600]),
        (open_source("digits", "train"), [1437]),
    ):
        told = []
        table = source.label_table(told.append)
        assert table.dtype == np.int32
        assert table.tolist() == [list(source[index].labels) for index in range(len(source))]
        assert told == expected


def test_test_split_shares_the_numbers_of_training(folder):
    names = open_source("folder", "train", path=str(folder)).class_names
    test = open_source("folder", "test", path=str(folder), class_names=names)
    assert {test[i].labels for i in range(len(test))} == {(0,), (2,)}


def test_class_that_training_lacks_is_named(folder):
    with pytest.raises(UserError, match="classes that training lacks: ant"):
        open_source("folder", "test", path=str(folder), class_names=("cat", "fox"))


def test_one_folder_can_be_cut_into_splits(folder):
    parts = [
        open_source("folder", split, path=str(folder / "train"))
        for split in ("all[:75%]", "all[75%:]")
    ]
    names = [{part.describe(i) for i in range(len(part))} for part in parts]
    assert (len(names[0]), len(names[1])) == (9, 3)
    assert not names[0] & names[1]


def test_error_of_a_missing_split_lists_the_splits(folder):
    with pytest.raises(UserError, match=r"no folder .*/val.*has: test, train"):
        open_source("folder", "val", path=str(folder))


def test_folder_without_images_is_named(tmp_path):
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match="no images in .*/train"):
        open_source("folder", "train", path=str(tmp_path))


def test_class_without_test_images_is_known(folder):
    names = open_source("folder", "train", path=str(folder)).class_names
    assert open_source("folder", "test", path=str(folder), class_names=names).empty_classes == (
        "cat",
    )


def test_folder_on_another_file_system_is_read(folder):
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").put(str(folder), "/pets", recursive=True)
    ours = open_source("folder", "train", path=str(folder))
    theirs = open_source("folder", "train", path="memory://pets")
    assert theirs.class_names == ours.class_names
    assert [theirs[i] for i in range(12)] == [ours[i] for i in range(12)]


def test_file_system_that_is_not_installed_is_named():
    with pytest.raises(UserError, match="cannot .* nosuch://bucket"):
        open_source("folder", "train", path="nosuch://bucket")


def test_mixture_joins_its_parts_and_numbers_classes_by_name(folder):
    parts = (f"folder:{folder}/train", f"folder:{folder}/test")
    mixture = open_source("mixture", "all", parts=parts)
    assert mixture.sizes == (12, 8) and len(mixture) == 20
    for index in range(20):
        assert f"/{mixture.class_names[mixture[index].labels[0]]}/" in mixture.describe(index)
        assert mixture.labels_of(index) == mixture[index].labels


def test_mixture_follows_the_training_classes(folder):
    with pytest.raises(UserError, match="classes that training lacks: cat"):
        open_source("mixture", "train", parts=(f"folder:{folder}",), class_names=("ant", "fox"))


@pytest.mark.parametrize(
    "weights, parts", [((0.5,), ("digits", "digits")), ((1, 0), ("digits", "digits")), (None, ())]
)
def test_bad_mixture_is_refused(weights, parts):
    with pytest.raises(UserError, match=r"data\.(weights|parts)"):
        open_source("mixture", "train", parts=parts, weights=weights)


def test_some_classes_are_numbered_in_the_order_given(folder):
    train = open_source("folder", "train", path=str(folder), only=("fox", "ant"))
    everything = open_source("folder", "train", path=str(folder))
    assert train.class_names == ("fox", "ant")
    old = [everything.class_names[everything.labels_of(i)[0]] for i in range(len(everything))]
    new = [train.class_names[train.labels_of(i)[0]] for i in range(len(train))]
    assert new == [name for name in old if name != "cat"]
    assert [train[i].labels for i in range(len(train))] == [
        train.labels_of(i) for i in range(len(train))
    ]
    assert {Path(train.describe(i)).relative_to(folder).parts[1] for i in range(len(train))} == {
        "fox",
        "ant",
    }
    # The test split, which lacks the class cat, has the same numbers.
    test = open_source(
        "folder", "test", path=str(folder), class_names=train.class_names, only=("fox", "ant")
    )
    assert {
        ("fox", "ant").index(Path(test.describe(i)).relative_to(folder).parts[1]) for i in range(4)
    } == {1}
    assert {test.labels_of(i) for i in range(4)} == {(1,)}


def test_image_of_several_classes_keeps_the_labels_of_those_chosen():
    class Several(Source):
        class_names = ("a", "b", "c")
        max_labels = 3

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return Example(
                np.full((1, 1, 3), index, np.uint8), ((0, 1), (1,), (0, 2, 1), ())[index]
            )

    chosen = of_classes(Several(), ("c", "a"))
    assert [(int(chosen[i].image[0, 0, 0]), chosen[i].labels) for i in range(len(chosen))] == [
        (0, (1,)),
        (2, (1, 0)),
    ]


def test_classes_of_digits_may_be_given_as_numbers():
    assert open_source("digits", "test", only=(5, 6)).class_names == ("5", "6")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("fix", "ant"), r"no class 'fix' \(data.classes\); did you mean 'fox'"),
        (("ant", "ant"), "names a class twice: ant, ant"),
        (("owl",), r"no image is of the classes owl \(data.classes\)"),
    ],
)
def test_classes_that_are_not_there_are_one_line(names, message, folder):
    (folder / "train" / "owl").mkdir()
    with pytest.raises(UserError, match=message):
        open_source("folder", "train", path=str(folder), only=names)


def test_synthetic_images_are_functions_of_their_index():
    source, again = (
        open_source("synthetic", "train", image_size=12, num_classes=7) for _ in range(2)
    )
    np.testing.assert_array_equal(source[3].image, again[3].image)
    assert not np.array_equal(source[3].image, source[4].image)
    assert all(0 <= source[i].labels[0] < 7 for i in range(len(source)))


PREPARE = """
import io, sys
import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

class {name}(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    def _info(self):
        features = dict(image=tfds.features.Image(shape=(None, None, 3)), {feature})
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))
    def _split_generators(self, _):
        return dict(train=self._generate_examples(20), test=self._generate_examples(6))
    def _generate_examples(self, count):
        for i in range(count):
            file = io.BytesIO()
            Image.new("RGB", (6, 5), (i * 10,) * 3).save(file, "PNG")
            file.seek(0)
            yield i, dict(image=file, {value})

{name}(data_dir=sys.argv[1], file_format="array_record").download_and_prepare()
"""
ONE_LABEL = dict(
    name="OneLabel",
    feature="label=tfds.features.ClassLabel(names=['ant', 'cat', 'fox'])",
    value="label=i % 3",
)
MANY_LABELS = dict(
    name="ManyLabels",
    feature="labels=tfds.features.Sequence(tfds.features.ClassLabel(num_classes=9))",
    value="labels=list(range(i % 4))",
)


def prepare(folder: Path, **text) -> None:
    script = folder / "prepare.py"
    script.write_text(PREPARE.format(**text))
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tfds")
    prepare(folder, **ONE_LABEL)
    prepare(folder, **MANY_LABELS)
    return folder


def test_tfds_data_set_is_read_by_index(prepared):
    source = open_source("tfds", "train", path=f"one_label:{prepared}")
    assert (len(source), source.class_names) == (20, ("ant", "cat", "fox"))
    shades = [np.asarray(Image.open(io.BytesIO(source[i].image)))[0, 0, 0] for i in range(20)]
    assert sorted(shades) == [10 * i for i in range(20)]
    assert all(source[i].labels == (shades[i] // 10 % 3,) for i in range(20))


def test_tfds_splits_are_sliced_and_joined(prepared):
    assert len(open_source("tfds", "train[:25%]", path=f"one_label:{prepared}")) == 5
    assert len(open_source("tfds", "train[10:]+test", path=f"one_label:{prepared}")) == 16


def test_stored_files_list_the_files_of_records_with_their_sizes(prepared):
    name = "one_label-{}.array_record-00000-of-00001"
    source = open_source("tfds", "train[:25%]+test[:2]", path=f"one_label:{prepared}")
    assert [*source.stored_files()] == [(name.format("train"), 20), (name.format("test"), 6)]
    pattern = prepared / "one_label" / "1.0.0" / "*-train.array_record*"
    source = open_source("array_record", "all[:50%]", path=str(pattern), num_classes=3)
    (file,) = pattern.parent.glob(pattern.name)
    assert [*source.stored_files()] == [(name.format("train"), file.stat().st_size)]


def test_tfds_sequence_of_labels_is_kept(prepared):
    source = open_source("tfds", "train", path=f"many_labels:{prepared}", label_key="labels")
    assert len(source.class_names) == 9
    assert {source[i].labels for i in range(20)} == {(), (0,), (0, 1), (0, 1, 2)}
    for labels, row in zip(
        map(source.labels_of, range(20)), source.label_table().tolist(), strict=True
    ):
        assert row == [*labels, *[-1] * (source.max_labels - len(labels))]


def test_tfds_unknown_split_lists_the_real_ones(prepared):
    with pytest.raises(UserError, match="no split 'validation'; there are: .*t"):
        open_source("tfds", "validation", path=f"one_label:{prepared}")


def test_tfds_unknown_label_key_names_the_nearest(prepared):
    with pytest.raises(UserError, match="'lable'.*did you mean 'label'"):
        open_source("tfds", "train", path=f"one_label:{prepared}", label_key="lable")


def test_tfds_unknown_data_set_is_named(prepared):
    with pytest.raises(UserError, match="TFDS has no data set 'no_such_set'"):
        open_source("tfds", "train", path=f"no_such_set:{prepared}")


def test_error_of_an_unprepared_tfds_data_set_contains_the_command(tmp_path):
    with pytest.raises(UserError, match="run: tfds build imagenet2012 --file_format=array_record"):
        open_source("tfds", "train", path=f"imagenet2012:{tmp_path}")


def test_tfds_folder_above_a_data_sets_names_it(prepared):
    with pytest.raises(UserError, match=f"; there is one in {prepared}/one_label/1.0.0"):
        open_source("tfds", "train", path=f"{prepared}/one_label")


def test_tfds_folder_without_a_data_set_is_named(tmp_path):
    with pytest.raises(UserError, match=f"no prepared data set in {tmp_path}/nothing"):
        open_source("tfds", "train", path=f"{tmp_path}/nothing")


def test_error_of_another_tfds_format_contains_the_command_to_convert(tmp_path):
    prepare(tmp_path, **ONE_LABEL)
    # Writing TFRecord files needs TensorFlow. Changing the description is enough for this error.
    info = tmp_path / "one_label" / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
    for file in info.parent.glob("*.array_record*"):
        file.rename(str(file).replace("array_record", "tfrecord"))
    with pytest.raises(
        UserError, match="not stored as ArrayRecord; run: python -m vit_jax.prepare"
    ):
        open_source("tfds", "train", path=f"one_label:{tmp_path}")


def test_tfds_folder_is_read_by_its_path(prepared):
    assert len(open_source("tfds", "train", path=str(prepared / "one_label" / "1.0.0"))) == 20


def test_array_record_files_are_read_without_their_description(prepared):
    pattern = prepared / "one_label" / "1.0.0" / "*-train.array_record*"
    source = open_source("array_record", "all", path=str(pattern), num_classes=3)
    same = open_source("tfds", "train", path=f"one_label:{prepared}")
    assert [source[i] for i in range(20)] == [same[i] for i in range(20)]


def test_tfds_slices_are_cut_again(prepared):
    def shades(split: str) -> list[int]:
        source = open_source("tfds", split, path=f"one_label:{prepared}")
        return [
            np.asarray(Image.open(io.BytesIO(source[i].image)))[0, 0, 0] for i in range(len(source))
        ]

    assert shades("train[:80%][75%:]") == shades("train")[12:16]
    assert shades("train[10:][:2]+test[:1]") == shades("train")[10:12] + shades("test")[:1]


def test_array_records_are_read_without_an_import(prepared, monkeypatch):
    pattern = prepared / "one_label" / "1.0.0" / "*-train.array_record*"
    opened = open_source("array_record", "all", path=str(pattern), num_classes=3)
    handed = pickle.loads(pickle.dumps(opened))  # As in a worker process.
    real = builtins.__import__

    def no_tfds(name, *arguments):
        assert not name.startswith("tensorflow_datasets")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", no_tfds)
    assert opened[0] == handed[0]


def test_a_remote_folder_imports_its_file_system_where_it_is_unpickled(monkeypatch):
    root = "memory://remote/pictures"
    fsspec.filesystem("memory").pipe(f"{root}/cat/1.png", b"1")
    pickled = pickle.dumps(open_source("folder", "all", path=root, labels=False))
    seen = []
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: seen.append(url) or (None, url))
    pickle.loads(pickled)
    assert [url.rstrip("/") for url in seen] == [root]


def test_array_record_slices_are_samples_of_files_that_are_sorted(prepared):
    pattern = prepared / "one_label" / "1.0.0" / "*.array_record*"
    whole, *parts = (
        open_source("array_record", split, path=str(pattern), num_classes=3)
        for split in ("all", "all[:50%]", "all[50%:]")
    )
    places = [[int(part.describe(i).split()[-1]) for i in range(len(part))] for part in parts]
    assert len(whole) == 26 and sorted(places[0] + places[1]) == list(range(26))
    assert (
        places[0] != sorted(places[0])
        and min(len({place // 9 for place in half}) for half in places) == 3
    )
    assert parts[0][0] == whole[places[0][0]]


def test_label_outside_the_classes_is_named(prepared):
    pattern = prepared / "one_label" / "1.0.0" / "*-train.array_record*"
    with pytest.raises(
        UserError, match="example [0-9]+ has the label 2, outside the data set's 2 classes"
    ):
        open_source("array_record", "all", path=str(pattern), num_classes=2)


@pytest.mark.parametrize("keep", [0, 0.5, 0.99])
def test_array_record_file_cut_short_is_named(prepared, tmp_path, keep):
    (file,) = (prepared / "one_label" / "1.0.0").glob("*-train.array_record*")
    data = file.read_bytes()
    (tmp_path / "cut.array_record").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(UserError, match="cannot read .*cut.array_record"):
        source = open_source(
            "array_record", "all", path=str(tmp_path / "cut.array_record"), num_classes=3
        )
        [source[i] for i in range(20)]


def test_missing_array_record_files_are_named(tmp_path):
    with pytest.raises(UserError, match="no files .*/none"):
        open_source("array_record", "all", path=f"{tmp_path}/none*", num_classes=3)


def test_tfds_is_read_without_tensorflow(prepared):
    code = (
        "import sys; from vit_jax.data.sources import open_source\n"
        f"open_source('tfds', 'train', path='one_label:{prepared}')[0]\n"
        "sys.exit('tensorflow' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def differing(first: Path, second: Path) -> set[str]:
    one, two = (
        fingerprint(open_source("folder", "train", path=str(path))) for path in (first, second)
    )
    return {name for name in one if one[name] != two[name]}


@pytest.fixture
def copies(tmp_path):
    """Returns two folders with the same images, as on two hosts."""
    for host in "ab":
        for index in range(4):
            file = tmp_path / host / "train" / f"class{index % 2}" / f"{index}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((2, 2, 3), index, np.uint8)).save(file)
    return tmp_path / "a", tmp_path / "b"


def test_copies_have_one_fingerprint(copies):
    assert differing(*copies) == set()


def test_fingerprint_shows_a_missing_image(copies):
    (copies[1] / "train" / "class1" / "3.png").unlink()
    assert "images" in differing(*copies)


def test_fingerprint_shows_another_class_name(copies):
    (copies[1] / "train" / "class1").rename(copies[1] / "train" / "class2")
    assert differing(*copies) == {"class names", "files"}


def test_fingerprint_shows_another_image(copies):
    file = copies[1] / "train" / "class1" / "3.png"
    file.write_bytes(bytes(file.stat().st_size))
    assert differing(*copies) == {"examples"}
    file.write_bytes(b"")
    assert differing(*copies) == {"examples", "files"}


@pytest.fixture
def unlabelled(tmp_path):
    """Returns a folder of images in several subfolders and of other files."""
    names = (
        "b.png",
        "a.jpg",
        "2021/c.jpg",
        "2021/may/d.webp",
        ".thumbs/e.png",
        "2021/.x/f.png",
        "notes.txt",
    )
    for name in names:
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).write_bytes(b"image")
    return tmp_path


def test_folder_without_labels_has_the_images_at_every_depth(unlabelled):
    source = open_source("folder", "train", path=str(unlabelled), labels=False)
    assert (source.class_names, source.empty_classes) == ((), ())
    found = [source.describe(index).split("/train/")[1] for index in range(len(source))]
    assert found == ["2021/c.jpg", "2021/may/d.webp", "a.jpg", "b.png"]
    assert source.label_table().tolist() == [[-1]] * 4


def test_folder_with_labels_ignores_hidden_folders(unlabelled):
    assert open_source("folder", "train", path=str(unlabelled)).class_names == ("2021",)


def test_images_without_classes_are_no_labelled_folder(unlabelled):
    (unlabelled / "test").mkdir()
    (unlabelled / "test" / "a.png").write_bytes(b"image")
    with pytest.raises(
        UserError, match="a folder per class.*1 images outside the folders of classes"
    ):
        open_source("folder", "test", path=str(unlabelled))


def test_links_that_lead_in_circles_are_followed_once(folder):
    train = folder / "train"
    whole = len(open_source("folder", "train", path=str(folder)))
    for name, target in {
        "ant/up": "..",
        "ant/again": "..",
        "cat/itself": ".",
        "fox/loop": "loop",
    }.items():
        (train / name).symlink_to(target)
    for labels in (True, False):
        source = open_source("folder", "train", path=str(folder), labels=labels)
        assert len(source) == whole
        assert not [
            i for i in range(whole) if "/up/" in source.describe(i) or "again" in source.describe(i)
        ]


def test_two_classes_may_be_links_to_one_folder(folder, tmp_path_factory):
    linked = tmp_path_factory.mktemp("linked")
    (linked / "train").mkdir()
    for name in ("one", "two"):
        (linked / "train" / name).symlink_to(folder / "train" / "ant")
    assert (
        open_source("folder", "train", path=str(linked)).label_table().ravel().tolist()
        == [0] * 4 + [1] * 4
    )


def test_class_that_is_a_link_to_nothing_is_named(folder):
    (folder / "train" / "owl").symlink_to("nowhere")
    with pytest.raises(UserError, match="train/owl is a broken link"):
        open_source("folder", "train", path=str(folder))


def test_folder_of_splits_is_no_folder_of_classes(folder):
    with pytest.raises(UserError, match="has splits, not classes: test, train"):
        open_source("folder", "all[:90%]", path=str(folder))


def test_folder_that_links_lead_to_is_named_by_its_own_path(tmp_path):
    (tmp_path / "train" / "a" / "z").mkdir(parents=True)
    (tmp_path / "train" / "a" / "z" / "1.jpg").touch()
    (tmp_path / "train" / "a" / "b").symlink_to("z")
    source = open_source("folder", "train", path=str(tmp_path))
    assert [source.describe(i) for i in range(len(source))] == [f"{tmp_path}/train/a/z/1.jpg"]


def no_regular_files(folder: Path) -> list[Path]:
    """Creates files with image suffixes that are not regular files.

    They are a link to nothing, a link to itself, a pipe, a socket, and a link to a device.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = ("nothing.jpg", "loop.jpg", "pipe.jpg", "socket.jpg", "device.jpg")
    nothing, loop, pipe, listening, device = (folder / name for name in names)
    nothing.symlink_to("nowhere")
    loop.symlink_to("loop.jpg")
    os.mkfifo(pipe)
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as opened:
        opened.bind(f"{short}/socket")  # Paths of sockets have at most 107 bytes.
        os.rename(f"{short}/socket", listening)
    device.symlink_to("/dev/zero")
    return [nothing, loop, pipe, listening, device]


def test_irregular_files_cannot_be_read(folder):
    bad = no_regular_files(folder / "train" / "cat")
    source = open_source("folder", "train", path=str(folder))
    named = {source.describe(index): index for index in range(len(source))}
    for path in bad:
        with pytest.raises(OSError):
            source[named[str(path)]]


def test_folder_that_vanishes_while_it_is_listed_is_named(folder, monkeypatch):
    scandir = os.scandir

    def vanishing(where):
        if str(where).endswith("deep"):
            raise FileNotFoundError(2, "No such file or directory", where)
        return scandir(where)

    monkeypatch.setattr(os, "scandir", vanishing)
    with pytest.raises(UserError, match="cannot list .*deep: No such file or directory"):
        open_source("folder", "train", path=str(folder))
