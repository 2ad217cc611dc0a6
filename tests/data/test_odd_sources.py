"""`prepare` handles unusual layouts, system files, unsupported formats, and malicious files."""

import io
import json
import os
import resource
import shutil
import tarfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.test_prepare import GOLDEN, add, picture, prepare, read
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.preparation import readers


def save(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture(len(file.parts) + ord(file.stem[-1])))


def pets(root: Path, *splits: str) -> Path:
    for split in splits:
        for name in ("cat", "dog"):
            save(root / split / name / f"{name}0.png", root / split / name / f"{name}1.png")
    return root


def classes(done) -> tuple[str, ...]:
    return open_source("tfds", "train", path=done.path).class_names


def labels(done, split: str) -> list[tuple[int, ...]]:
    return sorted(label for _, label in read(done, split))


def test_stray_images_and_folders_beside_splits_are_no_classes(tmp_path):
    root = pets(tmp_path / "pets", "Train", "testing")
    save(root / "Train" / "preview.png", root / "docs" / "logo.png", root / "cover.png")
    save(root / "__MACOSX" / "Train" / "a.png", root / "Train" / "cat" / "._cat0.png")
    done = prepare(root, tmp_path / "out")
    assert classes(done) == ("cat", "dog") and done.splits == {"train": 4, "test": 4}
    assert labels(done, "train") == [(0,), (0,), (1,), (1,)]
    assert done.left_out == {
        "images outside the folders of classes": 2,
        "images in folders next to the splits": 1,
        "AppleDouble files (._*)": 1,
    }


def test_flat_test_split_has_images_without_labels(tmp_path):
    root = pets(tmp_path / "kaggle", "train")
    save(root / "test" / "1.png", root / "test" / "2.png")
    done = prepare(root, tmp_path / "out")
    assert classes(done) == ("cat", "dog") and done.splits == {"train": 4, "test": 2}
    source = open_source("tfds", "test", path=done.path, labels=False)
    assert {source[index].image for index in range(2)} == {
        (root / "test" / f"{name}.png").read_bytes() for name in "12"
    }


def test_classes_with_folders_in_them_are_refused_with_both_readings_and_the_advice_works(tmp_path):
    root = tmp_path / "pets"
    save(root / "cat" / "2023" / "1.png", root / "dog" / "2024" / "2.png")
    with pytest.raises(
        UserError,
        match="two ways: as the classes cat, dog, or as splits of these names with the classes "
        f"2023, 2024; for classes, move them into {root}/train, for splits, name them train, "
        "val and test",
    ):
        readers.find(str(root))
    (root / "train").mkdir()
    for name in ("cat", "dog"):
        (root / name).rename(root / "train" / name)
    done = prepare(root, tmp_path / "out")
    assert classes(done) == ("cat", "dog") and done.splits == {"train": 2}


def test_one_split_name_among_flat_folders_is_refused_with_both_readings(tmp_path):
    save(tmp_path / "bus" / "1.png", tmp_path / "car" / "2.png", tmp_path / "train" / "3.png")
    message = (
        r"as the split 'train' with other folders next to it \(bus, car\), or as the classes "
        r"bus, car, train"
    )
    with pytest.raises(UserError, match=message):
        readers.find(str(tmp_path))


def test_loose_images_beside_folders_are_refused_with_both_readings(tmp_path):
    root = tmp_path / "photos"
    save(root / "1.png", root / "2.png", root / "2021" / "3.png", root / "2022" / "4.png")
    with pytest.raises(
        UserError, match="2 images .*--kind=images.*classes 2021, 2022 .*--kind=folder"
    ):
        readers.find(str(root))
    assert len(readers.find(str(root), "folder").class_names) == 2
    assert readers.find(str(root), "images").class_names is None


def test_split_names_of_files_are_read_in_any_case(tmp_path):
    for name in ("Train-0", "pets.Testing.1", "sub/VAL-2"):
        file = tmp_path / "wds" / f"{name}.tar"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tar(file, {"0.png": picture(1), "0.cls": b"0"})
    assert [unit.split for unit in readers.find(str(tmp_path / "wds")).units] == [
        "train",
        "test",
        "val",
    ]


def write_tar(file: Path, members: dict[str, bytes] | list[tuple[str, bytes]]) -> Path:
    with tarfile.open(file, "w") as tar:
        for name, content in members.items() if isinstance(members, dict) else members:
            add(tar, name, content)
    return file


def samples(names: list[str], form: dict[int, str] | None = None) -> list[tuple[str, bytes]]:
    """Returns an image and a label for each name.

    Args:
      form: suffixes of some images by their index; the others are png.
    """
    members = []
    for i, name in enumerate(names):
        suffix = (form or {}).get(i, "png")
        content = picture(i, {"jfif": "JPEG", "tif": "TIFF"}.get(suffix, suffix.upper()))
        members += [(f"{name}.{suffix}", content), (f"{name}.cls", str(i).encode())]
    return members


NAMES = [f"{i:03d}" for i in range(6)]
TIFF = ".tif images (unsupported format)"
NOTES = {".txt files": 1, "samples without an image": 1}


@pytest.mark.parametrize(
    ("members", "expected", "left_out"),
    [
        (samples([f"im.v2.{name}" for name in NAMES]), 6, {}),
        (samples([f"./deep.er/{name}" for name in NAMES]), 6, {}),
        (samples(["same"] * 6), 6, {}),
        (samples(NAMES, {1: "bmp", 2: "gif", 3: "jfif", 4: "webp"}), 6, {}),
        (samples(NAMES, {1: "tif"}), 5, {TIFF: 1}),
        (samples(NAMES) + [("a.txt", b""), ("b.json", b"[]")], 6, NOTES),
        (samples(NAMES) + [("005.mask.png", b""), ("005.bmp", b"")], 6, {"further images of a sample": 2}),
        ([m for m in samples(NAMES) for m in (("._" + m[0], b"\0"), m)], 6, {"AppleDouble files (._*)": 12}),
        ([(n.replace(".png", ".photo.png"), c) for n, c in samples(NAMES)], 6, {}),
    ],
    ids=["dots", "folder", "one key", "formats", "tif", "notes", "further", "AppleDouble", "of two suffixes"],
)  # fmt: skip
def test_every_sample_of_a_webdataset_is_read_or_counted(members, expected, left_out, tmp_path):
    (tmp_path / "wds").mkdir()
    write_tar(tmp_path / "wds" / "train-0.tar", members)
    done = prepare(tmp_path / "wds", tmp_path / "out")
    assert done.splits == {"train": expected} and done.left_out == left_out and done.skipped == 0
    forms = ("PNG", "BMP", "GIF", "JPEG", "WEBP")
    numbers = {picture(i, form): i for i in range(6) for form in forms}
    assert all(numbers[image] == label for image, (label,) in read(done, "train"))


def test_apple_double_files_of_imagenet_tars_are_left_out(tmp_path):
    (tmp_path / "winter21_whole").mkdir()
    for synset in ("n00000001", "n00000002"):
        write_tar(
            tmp_path / "winter21_whole" / f"{synset}.tar",
            {"._a.JPEG": b"\0\5", "a.JPEG": picture(1)},
        )
    done = prepare(tmp_path / "winter21_whole", tmp_path / "out")
    assert done.splits == {"train": 2} and done.left_out == {"AppleDouble files (._*)": 2}
    write_tar(tmp_path / "winter21_whole" / "._n00000003.tar", {})
    whole = tmp_path / "fall11_whole.tar"
    with tarfile.open(whole, "w") as tar:
        for path in sorted((tmp_path / "winter21_whole").iterdir()):
            tar.add(path, path.name)
    for source in (whole, tmp_path / "winter21_whole"):
        assert readers.find(str(source)).class_names == ["n00000001", "n00000002"]


def test_names_that_are_no_utf_8_are_prepared(tmp_path):
    root = pets(tmp_path / "pets", "train")
    os.rename(root / "train" / "cat", os.fsencode(root / "train") + b"/caf\xe9")
    os.rename(
        root / "train" / "dog" / "dog0.png", os.fsencode(root / "train" / "dog") + b"/\xe9.png"
    )
    Path(os.fsdecode(os.fsencode(root / "train" / "dog") + b"/\xe8.png")).write_bytes(b"damaged")
    done = prepare(root, tmp_path / "out")
    assert classes(done) == ("caf\\udce9", "dog") and done.splits == {"train": 4}
    assert "dog/\\udce8.png\tnot one of the formats" in (done.folder / "skipped.txt").read_text()


@pytest.mark.parametrize(
    "label",
    [
        b"2147483647",
        b"-2",
        b"true",
        b"1.5",
        b'"cat"',
        b"[" * 100_000,
        b"9" * 5000,
        b"\xff",
        b"[0, 1e99]",
    ],
    ids=range(9),
)
def test_hostile_label_of_a_webdataset_is_one_line(label, tmp_path):
    (tmp_path / "wds").mkdir()
    write_tar(tmp_path / "wds" / "train-0.tar", {"0.png": picture(1), "0.cls": label})
    with pytest.raises(UserError, match="0.png has the label|'0'.*(no class index|label)"):
        prepare(tmp_path / "wds", tmp_path / "out")


@pytest.mark.parametrize(
    "note", [b"3", b"[1]", b'"x"', b"{" * 9, b'{"label": {"a": 1}}', b'{"label": null}']
)
def test_hostile_json_of_a_webdataset_is_one_line(note, tmp_path):
    (tmp_path / "wds").mkdir()
    write_tar(tmp_path / "wds" / "train-0.tar", {"0.png": picture(1), "0.json": note})
    with pytest.raises(UserError, match="'0'.*label"):
        prepare(tmp_path / "wds", tmp_path / "out")


def test_class_names_that_are_no_utf_8_are_one_line(tmp_path):
    (tmp_path / "classnames.txt").write_bytes(b"caf\xe9\n")
    write_tar(tmp_path / "train-0.tar", {"0.png": picture(1), "0.cls": b"0"})
    with pytest.raises(UserError, match="classnames.txt is not in UTF-8"):
        readers.find(str(tmp_path))


def test_long_extended_header_of_a_tar_is_one_line(tmp_path):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "é" * 120 + ".png", picture(1))
    header = bytearray(file.getvalue())
    header[124:136] = b"77777777777\0"  # 8 GiB.
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    (tmp_path / "train-0.tar").write_bytes(header)
    with pytest.raises(UserError, match="train-0.tar is empty or not a tar"):
        prepare(tmp_path / "train-0.tar", tmp_path / "out")


def write_parquet(file: Path, columns: dict, huggingface: object = None, **options) -> Path:
    table = pyarrow.table(columns)
    if huggingface is not None:
        text = huggingface if isinstance(huggingface, bytes) else json.dumps(huggingface)
        table = table.replace_schema_metadata({"huggingface": text})
    pyarrow.parquet.write_table(table, file, **options)
    return file


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (b"{", "metadata"),
        (b"\xff", "metadata"),
        (DEEP, "metadata"),
        ([1], "metadata"),
        ({"info": [1]}, "metadata"),
        ({"info": {"features": [1]}}, "metadata"),
        (
            {"info": {"features": {"label": {"_type": "ClassLabel", "names": 3}}}},
            "not a list of texts",
        ),
        (
            {"info": {"features": {"label": {"_type": "ClassLabel", "names": [1]}}}},
            "not a list of texts",
        ),
        ({"info": {"features": {"gone": {"_type": "Image"}}}}, "no one column of images"),
    ],
    ids=range(9),
)
def test_hostile_metadata_of_parquet_is_one_line(features, message, tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"image": [picture(1)], "label": [0]}, features)
    with pytest.raises(UserError, match=f"a.parquet.*{message}"):
        readers.find(str(file))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [3], "label": [0]}, "row 0 contains no image"),
        ({"image": ["a.png"], "label": [0]}, "row 0 contains no image"),
        (
            {"image": [{"path": "a.png"}], "label": [0]},
            "row 0 contains no image, only its path 'a.png'",
        ),
        ({"image": [[picture(1)]], "label": [0]}, "row 0 contains no image"),
        ({"image": [picture(1)], "label": ["cat"]}, "row 0: the label 'cat' is not a class index"),
        ({"image": [picture(1)], "label": [{"a": 1}]}, "is not a class index"),
        (
            {"image": [picture(1)], "label": [2**31 - 1]},
            "has the label 2147483647; class indices are from 0",
        ),
        ({"image": [picture(1)], "label": [True]}, "the label True is not a class index"),
    ],
    ids=range(8),
)
def test_hostile_columns_of_parquet_are_one_line(columns, message, tmp_path):
    file = write_parquet(tmp_path / "a.parquet", columns)
    with pytest.raises(UserError, match=message):
        prepare(file, tmp_path / "out", name="a")


def test_damaged_pages_of_parquet_are_one_line(tmp_path):
    file = write_parquet(
        tmp_path / "a.parquet", {"image": [picture(i) for i in range(50)], "label": [0] * 50}
    )
    content = bytearray(file.read_bytes())
    content[4:400] = bytes(396)
    file.write_bytes(content)
    with pytest.raises(UserError, match="a.parquet is truncated or not Parquet"):
        prepare(file, tmp_path / "out", name="a")


@pytest.mark.parametrize(
    ("image", "rows"),
    [(bytes(2**20), 300_000), (bytes(2**24), 1), (b"", 2**15)],
    ids=["rows", "page", "empty"],
)
def test_small_parquet_of_gigabytes_is_refused_in_little_memory(image, rows, tmp_path, monkeypatch):
    """The first file would be expanded to 300 GiB."""
    if rows != 300_000:
        monkeypatch.setattr(readers, "MIN_BYTES", 2**20)
    places = pyarrow.array([0] * rows, pyarrow.int32())
    images = pyarrow.DictionaryArray.from_arrays(places, [image])
    columns = {"image": images, "label": places.cast(pyarrow.int64())}
    file = write_parquet(tmp_path / "a.parquet", columns, compression="zstd", store_schema=False)
    assert file.stat().st_size < 4096
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        UserError, match=r"a.parquet contains more than \d+ MiB in .* bytes: it is damaged"
    ):
        prepare(file, tmp_path / "out", name="a")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # In KiB.


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("dataset_info.json", "{DATASET}", "{GONE}"),
        ("dataset_info.json", '"splits": [', '"splits": {'),
        ("features.json", "tensorflow_datasets.core", "gone"),
        ("features.json", '"featuresDict"', '"tensor"'),
    ],
)
def test_hostile_description_of_a_tfds_data_set_is_one_line(file, old, new, tmp_path):
    copy = Path(shutil.copytree(GOLDEN / "mini" / "2.3.1", tmp_path / "mini" / "2.3.1"))
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    with pytest.raises(UserError, match="is not a prepared TFDS data set"):
        readers.find(str(copy))
    with pytest.raises(UserError, match="mini"):
        open_source("tfds", "train", path=str(copy))[0]
