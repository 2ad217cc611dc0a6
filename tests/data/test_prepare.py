"""Every kind of data set is converted to a TFDS data set with each example once.

The bytes of images and the labels are unchanged.
"""

import csv
import dataclasses
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_data_source import ArrayRecordDataSource
from PIL import Image

from tests.data.test_sources import no_regular_files
from vit_jax.data.decode import decode
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.preparation import readers, writer
from vit_jax.preparation.index import WorkItem
from vit_jax.preparation.kept_embeddings import Embedder

GOLDEN = Path(__file__).parent / "golden"
CLASSES = ("n00000001", "n00000022", "n00000333")


def picture(shade: int, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 5), (shade, 0, 255 - shade)).save(file, form)
    return file.getvalue()


def pictures(split: str, count: int) -> list[tuple[str, bytes, int]]:
    """Returns names, images and labels. All images differ."""
    first = {"train": 0, "test": 200}[split]
    return [(f"{split}_{i}", picture(first + i), i % 3) for i in range(count)]


ALL = {"train": pictures("train", 30), "test": pictures("test", 9)}


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def make_folder(root: Path) -> Path:
    for split, examples in ALL.items():
        for name, image, label in examples:
            folder = root / "pets" / split / CLASSES[label] / ("deep" if label else "")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.PNG").write_bytes(image)
            (folder / "notes.txt").write_text("no image")
    return root / "pets"


def make_flat_folder(root: Path) -> Path:
    return make_folder(root) / "train"


def make_webdataset(root: Path, note=lambda label: {"cls": str(label)}, parts=2) -> Path:
    (root / "wds").mkdir()
    for split, examples in ALL.items():
        for part in range(parts):
            with tarfile.open(root / "wds" / f"pets-{split}-{part:06d}.tar", "w") as tar:
                for name, image, label in examples[part::parts]:
                    add(tar, f"some/{name}.png", image)
                    for suffix, text in note(label).items():
                        add(tar, f"some/{name}.{suffix}", text.encode())
    (root / "wds" / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    return root / "wds"


def make_webdataset_json(root: Path) -> Path:
    source = make_webdataset(root, lambda label: {"json": json.dumps({"label": label, "width": 6})})
    for split in ALL:
        (source / split).mkdir()
        for tar in source.glob(f"*-{split}-*"):
            tar.rename(source / split / tar.name[-10:])
    return source


def make_imagenet21k(root: Path) -> Path:
    (root / "winter21_whole").mkdir()
    for label, synset in enumerate(CLASSES):
        with tarfile.open(root / "winter21_whole" / f"{synset}.tar", "w") as tar:
            for name, image, its in ALL["train"]:
                if its == label:
                    add(tar, f"{synset}_{name}.JPEG", image)
    return root / "winter21_whole"


def make_fall11(root: Path) -> Path:
    tars = make_imagenet21k(root)
    with tarfile.open(root / "fall11_whole.tar", "w") as tar:
        for path in sorted(tars.iterdir(), reverse=True):
            tar.add(path, path.name)
    shutil.rmtree(tars)
    return root / "fall11_whole.tar"


def make_parquet(root: Path, several: bool = False) -> Path:
    (root / "hub" / "data").mkdir(parents=True)
    label = {"names": list(CLASSES), "_type": "ClassLabel"}
    feature = {"feature": label, "_type": "List"} if several else label
    key = "labels" if several else "label"
    features = {"image": {"_type": "Image"}, key: feature}
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema(
        [("image", image), (key, pyarrow.list_(pyarrow.int64()) if several else pyarrow.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    for split, examples in ALL.items():
        for part in range(2):
            rows = [
                {
                    "image": {"bytes": image, "path": name},
                    key: [label, *{2} - {label}] if several else label,
                }
                for name, image, label in examples[part::2]
            ]
            table = pyarrow.Table.from_pylist(rows, schema)
            file = root / "hub" / "data" / f"{split}-{part:05d}-of-00002.parquet"
            pyarrow.parquet.write_table(table, file, row_group_size=4)
    return root / "hub"


def run(tasks: list[WorkItem], what: str, unit: str) -> None:
    for task in tasks:
        if not task.result.exists():
            task.function(*task.arguments)


def prepare(source: Path | str, out: Path, label_key=None, **options) -> writer.Prepared:
    return writer.prepare(
        readers.find(str(source), None, label_key), out, writer.Options(**options), run, run
    )


def read(done: writer.Prepared, split: str) -> list[tuple[bytes, tuple[int, ...]]]:
    source = open_source("tfds", split, path=done.path, label_key=done.label_key)
    return [tuple(source[i]) for i in range(len(source))]


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_folder(tmp_path)


@pytest.mark.parametrize(
    ("make", "kind", "splits"),
    [
        (make_folder, "folder", {"train", "test"}),
        (make_flat_folder, "folder", {"train"}),
        (make_webdataset, "webdataset", {"train", "test"}),
        (make_webdataset_json, "webdataset", {"train", "test"}),
        (make_imagenet21k, "imagenet21k", {"train"}),
        (make_fall11, "imagenet21k", {"train"}),
        (make_parquet, "parquet", {"train", "test"}),
    ],
)
def test_each_kind_keeps_every_example_once(make, kind, splits, tmp_path):
    source = make(tmp_path)
    assert readers.find(str(source)).kind == kind
    done = prepare(source, tmp_path / "out", shards=3)
    assert set(done.splits) == splits and done.skipped == 0
    for split in splits:
        expected = sorted((image, (label,)) for _, image, label in ALL[split])
        assert sorted(read(done, split)) == expected
    assert open_source("tfds", "train", path=done.path).class_names == CLASSES
    assert not (done.folder / writer.WORK).exists()


def test_classes_images_and_unused_files_are_listed_before_anything_is_written(folder, tmp_path):
    (folder / "train" / CLASSES[0] / "notes.txt").write_text("")
    lines = []

    def write(tasks, what, unit):
        lines.append(f"{what}: {len(tasks)}")
        run(tasks, what, unit)

    source = readers.find(str(folder))
    writer.prepare(source, tmp_path / "out", writer.Options(shards=1), run, write, log=lines.append)
    train, test = len(ALL["train"]), len(ALL["test"])
    names, images, left_out, first, *_ = lines
    assert names == f"{len(CLASSES)} classes: {', '.join(CLASSES)}"
    assert sorted(images.split(", ")) == [f"test {test} images", f"train {train} images"]
    assert left_out == f"note: skipped: {len(list(folder.rglob('*.txt')))} .txt files"
    assert first.startswith("writing ")


def test_several_labels_an_image_are_a_sequence(tmp_path):
    done = prepare(make_parquet(tmp_path, several=True), tmp_path / "out")
    assert done.label_key == "labels"
    expected = sorted((image, (label, *{2} - {label})) for _, image, label in ALL["train"])
    assert sorted(read(done, "train")) == expected


def test_several_labels_in_json_are_a_sequence(tmp_path):
    source = make_webdataset(
        tmp_path, lambda label: {"json": json.dumps({"labels": [label] * label})}
    )
    done = prepare(source, tmp_path / "out")
    expected = sorted((image, (label,) * min(label, 1)) for _, image, label in ALL["train"])
    assert sorted(read(done, "train")) == expected


def test_tfrecord_of_tensorflow_is_copied_in_its_order_with_all_features(tmp_path):
    done = prepare(f"mini:{GOLDEN}", tmp_path, shards=3)
    assert done.splits == {"train": 12, "test": 4} and done.folder == tmp_path / "mini" / "2.3.1"
    before, after = (
        json.loads((f / "features.json").read_text()) for f in (GOLDEN / "mini/2.3.1", done.folder)
    )
    assert before == after
    source = readers.find(str(GOLDEN / "mini" / "2.3.1"))
    for split in ("train", "test"):
        theirs = []
        for number, unit in enumerate(source.units):
            if unit.split == split:
                one = dataclasses.replace(source, units=[unit])
                entries = readers.scan(one, number, 0, tmp_path / "unused").entries
                theirs += [readers.read("tfds", unit.path, entry, "") for entry in entries]
        paths = tfds.builder_from_directory(done.folder).info.splits[split].filepaths
        ours = ArrayRecordDataSource([str(path) for path in paths])
        assert [ours[i] for i in range(len(ours))] == theirs
    shades = {
        Image.open(io.BytesIO(image)).getpixel((0, 0))[0]: label
        for image, label in read(done, "train")
    }
    assert shades == {10 * i: (i % 3,) for i in range(12)}


def test_tfrecord_has_few_shot_splits_too(tmp_path):
    done = prepare(GOLDEN / "mini" / "2.3.1", tmp_path, shots=(2,))
    assert sorted(label for _, (label,) in read(done, "train_2shot")) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("byte", "message"), [(3, "damaged at byte 0"), (40, "damaged in the example at byte 12")]
)
def test_damaged_tfrecord_is_named(byte, message, tmp_path):
    copy = shutil.copytree(GOLDEN / "mini", tmp_path / "mini") / "2.3.1"
    file = copy / "mini-train.tfrecord-00000-of-00002"
    content = bytearray(file.read_bytes())
    content[byte] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file}.*{message}"):
        prepare(copy, tmp_path / "out")


def test_prefixes_are_nested_and_the_seed_decides(folder, tmp_path):
    whole = prepare(folder, tmp_path / "all")
    part = prepare(folder, tmp_path / "part", limit=10)
    other = prepare(folder, tmp_path / "other", seed=1)
    assert part.splits == {"train": 10, "test": 9}
    assert read(part, "train") == read(whole, "train")[:10] == read(whole, "train[:10]")
    assert read(other, "train") != read(whole, "train")
    assert sorted(read(other, "train")) == sorted(read(whole, "train"))


def test_order_does_not_depend_on_the_form_of_imagenet21k(tmp_path):
    orders = []
    for make in (make_imagenet21k, make_fall11):
        place = tmp_path / make.__name__
        place.mkdir()
        orders.append(read(prepare(make(place), place / "out"), "train"))
    assert orders[0] == orders[1]


def test_few_shot_splits_are_balanced_nested_and_first_in_order(folder, tmp_path):
    done = prepare(folder, tmp_path / "out", shots=(1, 5))
    train, one, five = (read(done, split) for split in ("train", "train_1shot", "train_5shot"))
    for chosen, k in ((one, 1), (five, 5)):
        expected = [
            e for i, e in enumerate(train) if [label for _, label in train[:i]].count(e[1]) < k
        ]
        assert chosen == expected and len(chosen) == 3 * k


def test_too_few_images_for_the_shots_name_the_class(folder, tmp_path):
    with pytest.raises(
        UserError, match="--shots=11: class 'n00000001' has only 10 training images"
    ):
        prepare(folder, tmp_path / "out", shots=(1, 11))
    assert prepare(folder, tmp_path / "out", shots=(10,)).splits["train_10shot"] == 30


def test_unreadable_images_are_left_out_named_and_counted(folder, tmp_path):
    whole = prepare(folder, tmp_path / "whole", shots=(9,))
    bad = folder / "train" / CLASSES[0] / "train_0.PNG"
    bad.write_bytes(bad.read_bytes()[:50])
    done = prepare(folder, tmp_path / "out", shards=3, shots=(9,))
    assert done.splits == {"test": 9, "train": 29, "train_9shot": 27} and done.skipped == 1
    (line,) = (done.folder / "skipped.txt").read_text().splitlines()
    assert line.startswith(f"train\t{bad}\t")
    assert read(done, "train") == [e for e in read(whole, "train") if e[0] != ALL["train"][0][1]]
    assert ALL["train"][0][1] not in [image for image, _ in read(done, "train_9shot")]


def test_irregular_files_are_skipped_and_named(folder, tmp_path):
    bad = no_regular_files(folder / "train" / CLASSES[1])
    (folder / "train" / CLASSES[1] / "up").symlink_to("..")
    done = prepare(folder, tmp_path / "out")
    assert done.splits == {"test": 9, "train": 30} and done.skipped == len(bad)
    lines = (done.folder / "skipped.txt").read_text().splitlines()
    assert sorted(line.split("\t")[1] for line in lines) == sorted(map(str, bad))


@pytest.mark.parametrize("name", ["pipe.tar", "pipe.parquet", "data/pipe.tar"])
def test_pipe_in_the_place_of_a_tar_or_parquet_is_named(name, tmp_path):
    (tmp_path / "set" / "data").mkdir(parents=True)
    os.mkfifo(tmp_path / "set" / name)
    with pytest.raises(UserError, match=f"{name} is not a regular file"):
        readers.find(str(tmp_path / "set"))
    with pytest.raises(UserError, match=f"{name} is neither a folder nor a regular file"):
        readers.find(str(tmp_path / "set" / name))


def test_images_with_no_label_keep_none(tmp_path):
    """The test split of ImageNet on the Hugging Face Hub has no labels."""
    done = prepare(make_webdataset(tmp_path, lambda label: {"cls": "-1"}), tmp_path / "out")
    decoders = {"image": tfds.decode.SkipDecoding()}
    data = tfds.builder_from_directory(done.folder).as_data_source("test", decoders=decoders)
    assert {int(data[i]["label"]) for i in range(len(data))} == {-1}


def test_name_that_tfds_knows_is_found_by_the_printed_path(folder, tmp_path):
    done = prepare(folder, tmp_path / "out", name="mnist")
    assert len(read(done, "train")) == 30


def test_near_duplicates_of_test_images_leave_training(tmp_path):
    rng = np.random.default_rng(0)
    photos = [
        Image.fromarray(rng.integers(256, size=(8, 8, 3), dtype=np.uint8)).resize((64, 64))
        for _ in range(6)
    ]
    for split, chosen in {"train": photos[:5], "test": photos[3:]}.items():
        for i, photo in enumerate(chosen):
            path = tmp_path / "source" / split / "a" / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            photo.save(path, quality=95 if split == "train" else 60)
    whole = prepare(tmp_path / "source", tmp_path / "whole")
    test = f"source:{tmp_path / 'whole'}/test"
    done = prepare(tmp_path / "source", tmp_path / "out", deduplicate_against=(test,))
    assert done.splits == {"train": 3, "test": 3} and done.removed == 2
    report = (done.folder / "removed.csv").read_text()
    assert [f'/train/a/{i}.jpg","source:' in report for i in range(5)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert (done.folder / "removed.html").read_text().count("<img") == 4
    near = {(tmp_path / "source" / "train" / "a" / f"{i}.jpg").read_bytes() for i in (3, 4)}
    assert read(done, "train") == [
        example for example in read(whole, "train") if example[0] not in near
    ]
    with pytest.raises(UserError, match="--deduplicate_against=none: give NAME:DIR/SPLIT"):
        prepare(tmp_path / "source", tmp_path / "other", deduplicate_against=("none",))
    with pytest.raises(UserError, match="--deduplicate_against=no:/set/test: "):
        prepare(tmp_path / "source", tmp_path / "other", deduplicate_against=("no:/set/test",))


def test_near_duplicates_ignore_the_colours_of_transparent_pixels(tmp_path):
    rng = np.random.default_rng(0)
    disc = Image.fromarray((np.hypot(*(np.mgrid[:64, :64] - 31.5)) < 24).astype(np.uint8) * 255)
    photo, train, test = (
        Image.fromarray(rng.integers(256, size=(8, 8, 3), dtype=np.uint8)).resize((64, 64))
        for _ in range(3)
    )
    for split, hidden in {"train": train, "test": test}.items():
        hidden.paste(photo, mask=disc)
        hidden.putalpha(disc)
        path = tmp_path / "source" / split / "a" / "0.png"
        path.parent.mkdir(parents=True)
        hidden.save(path)
    hidden.convert("RGB").save(
        tmp_path / "source" / "train" / "a" / "1.png"
    )  # Only this image differs.
    prepare(tmp_path / "source", tmp_path / "whole")
    options = dict(deduplicate_against=(f"source:{tmp_path / 'whole'}/test",))
    done = prepare(tmp_path / "source", tmp_path / "out", **options)
    (line,) = (done.folder / "removed.csv").read_text().splitlines()[1:]
    assert '/train/a/0.png",' in line


def test_near_duplicates_are_found_by_a_models_embeddings(tmp_path):
    shades = {"train": (10, 60, 120, 240), "test": (61, 238)}
    for split, chosen in shades.items():
        for shade in chosen:
            path = tmp_path / "source" / split / "a" / f"{shade}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (30, 20), (shade, 255 - shade, 0)).save(path)
    prepare(tmp_path / "source", tmp_path / "whole")

    def mean_colour(source):
        colours = [decode(source[i].image).mean((0, 1)) for i in range(len(source))]
        return np.arange(len(source)), np.array(colours, np.float32)

    test = f"source:{tmp_path / 'whole'}/test"
    options = writer.Options(
        deduplicate_against=(test,), embeddings="mean colour", similarity=0.9999
    )
    source = readers.find(str(tmp_path / "source"), None, None)
    done = writer.prepare(
        source, tmp_path / "out", options, run, run, (Embedder("mean colour", 3, mean_colour), run)
    )
    assert done.splits == {"train": 2, "test": 2}
    with (done.folder / "removed.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {*rows[0]} == {"example", "reference", "similarity"}
    assert sorted(row["example"].split("/")[-1] for row in rows) == ["240.png", "60.png"]


def cut(path: Path, keep: float) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    return path


def test_tar_cut_short_is_named(tmp_path):
    source = make_webdataset(tmp_path)
    path = source / "pets-train-000001.tar"
    with tarfile.open(path) as tar:
        ends = [member.offset_data + 512 for member in tar]
    whole = path.read_bytes()
    for size, files in ((ends[2] - 480, 2), (ends[2], 3), (ends[2] + 100, 3), (0, None)):
        path.write_bytes(whole[:size])
        with pytest.raises(
            UserError, match=f"{path} is " + (f".* after {files} complete" if files else "empty")
        ):
            prepare(source, tmp_path / "out")


def test_tar_of_tars_cut_short_is_named(tmp_path):
    path = cut(make_fall11(tmp_path), 0.5)
    with pytest.raises(UserError, match=f"{path} is truncated or damaged after 1 complete files"):
        prepare(path, tmp_path / "out")


def test_parquet_cut_short_is_named(tmp_path):
    path = cut(make_parquet(tmp_path) / "data" / "train-00001-of-00002.parquet", 0.7)
    with pytest.raises(UserError, match=f"{path} is truncated"):
        prepare(tmp_path / "hub", tmp_path / "out")


def test_tfrecord_cut_short_is_named(tmp_path):
    copy = shutil.copytree(GOLDEN / "mini", tmp_path / "mini") / "2.3.1"
    path = cut(copy / "mini-train.tfrecord-00000-of-00002", 0.5)
    with pytest.raises(UserError, match=f"{path} is truncated: . of 6 examples are complete"):
        prepare(copy, tmp_path / "out")


def test_label_outside_the_classes_is_named(tmp_path):
    source = make_webdataset(tmp_path, lambda label: {"cls": str(label * 2)})
    with pytest.raises(UserError, match="some/test_2.png has the label 4, but there are 3 classes"):
        prepare(source, tmp_path / "out")


def test_classes_of_one_name_are_named(tmp_path):
    source = make_webdataset(tmp_path)
    (source / "classnames.txt").write_text("crane\nheron\ncrane\n")
    with pytest.raises(UserError, match="has 2 classes of the name 'crane'"):
        prepare(source, tmp_path / "out")


def test_sample_without_a_label_is_named(tmp_path):
    source = make_webdataset(tmp_path, lambda label: {"npy": "a cat"})
    with pytest.raises(UserError, match="some/test_0' has no .cls and no .json .* it has npy, png"):
        prepare(source, tmp_path / "out")


def test_class_missing_in_a_split_is_named(folder, tmp_path):
    shutil.rmtree(folder / "test" / CLASSES[1])
    with pytest.raises(
        UserError, match=f"{folder / 'test'} lacks 1 of 3 classes: {CLASSES[1]}; make an empty"
    ):
        prepare(folder, tmp_path / "out")
    (folder / "test" / CLASSES[1]).mkdir()
    assert prepare(folder, tmp_path / "out").splits == {"test": 6, "train": 30}


def test_error_of_a_compressed_tar_suggests_unpacking(tmp_path):
    (tmp_path / "winter21_whole.tar.gz").write_bytes(b"")
    for source in (tmp_path, tmp_path / "winter21_whole.tar.gz"):
        with pytest.raises(
            UserError, match="winter21_whole.tar.gz is compressed.*: unpack it first"
        ):
            readers.find(str(source))


def test_columns_to_choose_from_are_listed(tmp_path):
    table = pyarrow.table({"img": [picture(1)], "fine_label": [1], "coarse_label": [0]})
    source = tmp_path / "cifar-train.parquet"
    pyarrow.parquet.write_table(table, source)
    with pytest.raises(UserError, match="--label_key; there are: img, fine_label, coarse_label"):
        readers.find(str(source))
    done = prepare(source, tmp_path / "out", label_key="fine_label", name="cifar")
    assert read(done, "train") == [(picture(1), (1,))]


def test_member_names_are_never_paths(tmp_path):
    (tmp_path / "wds").mkdir()
    with tarfile.open(tmp_path / "wds" / "train-0.tar", "w") as tar:
        for name in ("../../escaped", "/tmp/escaped_from_tar"):
            add(tar, f"{name}.png", picture(1))
            add(tar, f"{name}.cls", b"0")
    before = set(tmp_path.rglob("*"))
    done = prepare(tmp_path / "wds", tmp_path / "out")
    assert done.splits == {"train": 2}
    new = set(tmp_path.rglob("*")) - before
    assert all((tmp_path / "out") in (path, *path.parents) for path in new)


@pytest.mark.parametrize("options", [dict(seed=1), dict(limit=7), dict(shards=2)])
def test_other_options_into_the_same_place_are_refused(options, folder, tmp_path):
    prepare(folder, tmp_path / "out")
    with pytest.raises(UserError, match=f"was started with {next(iter(options))} "):
        prepare(folder, tmp_path / "out", **options)


def test_source_that_changed_is_refused(folder, tmp_path):
    prepare(folder, tmp_path / "out")
    (folder / "train" / CLASSES[0] / "new.png").write_bytes(picture(7))
    with pytest.raises(UserError, match="was started with other files in the source"):
        prepare(folder, tmp_path / "out")


def test_preparation_continues_after_a_damaged_source_is_repaired(tmp_path):
    source = make_webdataset(tmp_path)
    path = source / "pets-train-000001.tar"
    whole = path.read_bytes()
    cut(path, 0.5)
    with pytest.raises(UserError, match="truncated"):
        prepare(source, tmp_path / "out")
    path.write_bytes(whole)
    assert prepare(source, tmp_path / "out").splits == {"train": 30, "test": 9}


def test_place_inside_the_source_is_refused(folder):
    with pytest.raises(UserError, match="--out lies inside the source"):
        prepare(folder, folder / "out")


def test_output_folder_with_other_files_is_rejected(folder, tmp_path):
    (tmp_path / "out" / "pets" / "1.0.0").mkdir(parents=True)
    (tmp_path / "out" / "pets" / "1.0.0" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"contains something else \(thesis.txt\)"):
        prepare(folder, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "pets" / "1.0.0").iterdir()] == ["thesis.txt"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="--out: .*file"):
        prepare(folder, tmp_path / "file")


def test_tfds_finds_the_data_set_only_when_it_is_complete(folder, tmp_path):
    def stop(tasks, what, unit):
        run(tasks[:2], what, unit)
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        writer.prepare(readers.find(str(folder)), out, writer.Options(shards=4), run, stop)
    with pytest.raises(UserError, match="TFDS has no data set"):
        open_source("tfds", "train", path=f"pets:{out}")
    first = {path: path.stat().st_mtime_ns for path in out.glob("pets/1.0.0/*.array_record*")}
    assert len(first) == 2
    with pytest.raises(UserError, match="was started with seed 0, now 1"):
        prepare(folder, out, shards=4, seed=1)
    done = prepare(folder, out, shards=4)
    assert first == {path: path.stat().st_mtime_ns for path in first}
    assert sorted(read(done, "train")) == sorted(
        (image, (label,)) for _, image, label in ALL["train"]
    )


def test_orders_are_fair(tmp_path):
    """The first third has a fair share of each class, within random variation."""
    root = tmp_path / "many"
    for label in range(3):
        (root / str(label)).mkdir(parents=True)
        for i in range(200):
            (root / str(label) / f"{i}.png").write_bytes(picture(i % 256))
    labels = np.array(
        [label for _, (label,) in read(prepare(root, tmp_path / "out"), "train[:200]")]
    )
    assert (np.abs(np.bincount(labels) - 200 / 3) < 4 * np.sqrt(200 * 2 / 9)).all()
