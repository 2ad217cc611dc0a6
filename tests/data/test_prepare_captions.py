"""Images with captions in all formats become the same data set, whose captions are used in
training.
"""

import csv
import io
import json
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_data_source import ArrayRecordDataSource

from tests.data.test_prepare import add, picture, run
from vit_jax.data.fields import TEXT, Field, draw_caption
from vit_jax.data.pipeline import training_batches
from vit_jax.data.preprocess import TrainCrop
from vit_jax.data.sources import open_source
from vit_jax.data.sources.base import fingerprint
from vit_jax.errors import UserError
from vit_jax.preparation import readers, writer

# The captions and the class of each image.
PAIRS = {
    "train": [
        (f"images/{i}.png", [f"a picture {i}", f"one, more\nof {i}", "ü"][: 1 + i % 3], "ab"[i % 2])
        for i in range(12)
    ],
    "test": [(f"images/{i}.png", [f"test {i}"], "ab"[i % 2]) for i in range(12, 16)],
}


def write_images(root: Path) -> None:
    (root / "images").mkdir(parents=True, exist_ok=True)
    for rows in PAIRS.values():
        for name, *_ in rows:
            (root / name).write_bytes(picture(int(Path(name).stem)))


def write_csv(root: Path, split: str, rows, labels: bool = False) -> None:
    with (root / f"{split}.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["file", "caption", *(["label"] if labels else [])])
        for name, captions, label in rows:
            lines.writerows([name, caption, *([label] if labels else [])] for caption in captions)


def make_csv(root: Path, labels: bool = False) -> Path:
    write_images(root / "pairs")
    for split, rows in PAIRS.items():
        write_csv(root / "pairs", split, rows, labels)
    return root / "pairs"


def make_json_lines(root: Path) -> Path:
    write_images(root / "pairs")
    for split, rows in PAIRS.items():
        lines = (json.dumps({"file_name": name, "text": captions}) for name, captions, _ in rows)
        (root / "pairs" / f"{split}.jsonl").write_text("\n".join(lines))
    return root / "pairs"


def one_caption(row) -> dict[str, bytes]:
    return {"txt": row[1][0].encode()}


def all_captions(row) -> dict[str, bytes]:
    return {"json": json.dumps({"caption": row[1], "width": 6}).encode()}


def make_tars(root: Path, notes: Callable[[tuple], dict[str, bytes]] = all_captions) -> Path:
    """Writes two tar files per split, as img2dataset does.

    Args:
      notes: returns the contents of an image's other files by their suffix.
    """
    (root / "pairs").mkdir()
    for split, rows in PAIRS.items():
        for part in range(2):
            with tarfile.open(root / "pairs" / f"{split}-{part:05d}.tar", "w") as tar:
                for row in rows[part::2]:
                    stem = Path(row[0]).stem.zfill(9)
                    add(tar, f"{stem}.png", picture(int(stem)))
                    for suffix, content in notes(row).items():
                        add(tar, f"{stem}.{suffix}", content)
    return root / "pairs"


def write_parquet(root: Path, columns: Callable[[list], dict]) -> Path:
    (root / "pairs").mkdir()
    for split, rows in PAIRS.items():
        for part in range(2):
            chosen = rows[part::2]
            image = [picture(int(Path(name).stem)) for name, *_ in chosen]
            table = pyarrow.table({"image": image, **columns(chosen)})
            file = root / "pairs" / f"{split}-{part:05d}-of-00002.parquet"
            pyarrow.parquet.write_table(table, file, row_group_size=2)
    return root / "pairs"


def make_parquet(root: Path) -> Path:
    def columns(rows) -> dict:
        image = [
            {"bytes": picture(int(Path(name).stem)), "path": Path(name).name} for name, *_ in rows
        ]
        return {"image": image, "captions": [texts for _, texts, _ in rows]}

    return write_parquet(root, columns)


def prepare(source, out: Path, caption_key=None, **options) -> writer.Prepared:
    found = readers.find(str(source), caption_key=caption_key)
    return writer.prepare(found, out, writer.Options(**options), run, run)


def opened(done: writer.Prepared, split: str, **options):
    return open_source("tfds", split, path=done.path, labels=False, fields=(TEXT,), **options)


def images_and_captions(source) -> dict[bytes, tuple[str, ...]]:
    return {source[i].image: source.fields_of(i)[TEXT] for i in range(len(source))}


def expected(split: str) -> dict[bytes, tuple[str, ...]]:
    return {picture(int(Path(name).stem)): tuple(texts) for name, texts, _ in PAIRS[split]}


@pytest.mark.parametrize("make", [make_csv, make_json_lines, make_tars, make_parquet])
def test_each_format_keeps_all_captions_of_every_image(make, tmp_path):
    done = prepare(make(tmp_path), tmp_path / "out", shards=3)
    for split in PAIRS:
        assert images_and_captions(opened(done, split)) == expected(split)


def test_captions_do_not_change_the_order(tmp_path):
    source = make_csv(tmp_path, labels=True)
    orders = []
    for name, caption_key in (("with_captions", None), ("without", "")):
        done = prepare(source, tmp_path / "out", caption_key, name=name)
        train = open_source("tfds", "train", path=done.path)
        orders.append([tuple(train[i]) for i in range(len(train))])
        assert train.class_names == ("a", "b")
    assert orders[0] == orders[1]
    assert "captions" not in tfds.builder_from_directory(done.folder).info.features


def tokens(captions, rng) -> np.ndarray:
    return np.frombuffer(draw_caption(captions, rng).encode().ljust(24), np.uint8)


def batches(source) -> list[dict]:
    field = Field(TEXT, (24,), np.uint8, tokens)
    options = dict(crop=TrainCrop(8), seed=3, batch_size=5, first_step=2, workers=0, threads=1)
    made = training_batches(source, fields=(field,), **options)
    return [next(made) for _ in range(6)]


def test_the_same_captions_are_drawn_as_from_a_csv_in_the_prepared_order(tmp_path):
    source = make_csv(tmp_path)
    done = prepare(source, tmp_path / "out")
    data = tfds.builder_from_directory(done.folder).as_data_source("train")
    order = [data[i]["file_name"].decode() for i in range(len(data))]
    assert order != [name for name, *_ in PAIRS["train"]]
    write_csv(source, "train", sorted(PAIRS["train"], key=lambda row: order.index(row[0])))
    listed = open_source("csv", "train", path=str(source), labels=False, fields=(TEXT,))
    for ours, theirs in zip(batches(opened(done, "train")), batches(listed), strict=True):
        for key in ours:
            np.testing.assert_array_equal(ours[key], theirs[key])


def test_other_captions_are_other_data(tmp_path):
    """The fingerprint does not read the example with the changed caption."""
    root = make_csv(tmp_path)
    rows = [(f"images/{i % 16}.png", [f"a {i:03d}"], "a") for i in range(16)]
    write_csv(root, "train", rows)
    marks = []
    for name, change in (("one", ""), ("same", ""), ("other", "b")):
        rows[5] = (rows[5][0], [change or "a 005"], "a")
        write_csv(root, "train", rows)
        done = prepare(root, tmp_path / "out", name=name)
        marks.append(fingerprint(opened(done, "train"), samples=2)["fields"])
    assert marks[0] == marks[1] != marks[2]


def test_array_records_are_read_without_the_description(tmp_path):
    done = prepare(make_csv(tmp_path), tmp_path / "out", shards=2)
    options = dict(path=f"{done.folder}/*train*", labels=False, fields=(TEXT,))
    source = open_source("array_record", "all", **options)
    assert images_and_captions(source) == expected("train")
    with pytest.raises(UserError, match=r"no feature 'title' \(data.caption_key\)"):
        open_source("array_record", "all", caption_key="title", **options)


def test_a_feature_without_texts_is_no_caption(tmp_path):
    done = prepare(make_csv(tmp_path), tmp_path / "out")
    with pytest.raises(UserError, match="no captions 'label'.*features of text are: .*captions"):
        opened(done, "train", caption_key="label")
    assert opened(done, "train", caption_key="file_name").fields_of(0)[TEXT][0].startswith("images")


def test_captions_of_a_kind_without_any_are_rejected(tmp_path):
    make_csv(tmp_path)
    with pytest.raises(UserError, match="--caption_key=caption: data of the kind 'images'"):
        prepare(tmp_path / "pairs" / "images", tmp_path / "out", "caption")


def test_a_label_key_of_images_without_columns_is_rejected(tmp_path):
    make_csv(tmp_path)
    for kind, labels in {"images": "no labels", "folder": "the names of their folders"}.items():
        with pytest.raises(
            UserError, match=f"--label_key=kind: data of the kind '{kind}' have {labels}.*: remove"
        ):
            readers.find(str(tmp_path / "pairs"), kind, label_key="kind")


def test_skipping_uncaptioned_images_of_data_without_captions_is_rejected(tmp_path):
    source = make_csv(tmp_path, labels=True)
    with pytest.raises(UserError, match="only the kinds csv, .* may have captions: remove --skip"):
        prepare(source / "images", tmp_path / "out", skip_uncaptioned=True)
    with pytest.raises(UserError, match="no captions were found in .*; name them with"):
        prepare(source, tmp_path / "out", readers.NO_CAPTIONS, skip_uncaptioned=True)


def test_missing_images_of_a_list_are_counted_and_named(tmp_path):
    root = make_csv(tmp_path)
    for number in (1, 4):
        (root / "images" / f"{number}.png").unlink()
    with pytest.raises(UserError, match=r"2 of 12 images do not exist: images/1.png, images/4.png"):
        prepare(root, tmp_path / "out")


def test_an_empty_caption_of_a_list_is_named(tmp_path):
    root = make_csv(tmp_path)
    write_csv(root, "test", [("images/12.png", ["a", " "], "")])
    with pytest.raises(UserError, match="images/12.png in .*test.csv has an empty caption"):
        prepare(root, tmp_path / "out")


@pytest.mark.parametrize(
    "make",
    [
        lambda root: make_tars(root, one_caption),
        lambda root: write_parquet(root, lambda rows: {"text": [row[1][0] for row in rows]}),
    ],
    ids=["tars", "parquet"],
)
def test_an_image_may_have_one_caption(make, tmp_path):
    done = prepare(make(tmp_path), tmp_path / "out")
    first = {image: texts[:1] for image, texts in expected("train").items()}
    assert images_and_captions(opened(done, "train")) == first


def both(row) -> dict[str, bytes]:
    return {"cls": str("ab".index(row[2])).encode(), **all_captions(row)}


def in_json(row) -> dict[str, bytes]:
    return {"json": json.dumps({"label": "ab".index(row[2]), "text": row[1]}).encode()}


@pytest.mark.parametrize(
    "make",
    [
        lambda root: make_tars(root, both),
        lambda root: make_tars(root, in_json),
        lambda root: make_csv(root, labels=True),
        lambda root: write_parquet(
            root,
            lambda rows: {
                "label": ["ab".index(row[2]) for row in rows],
                "caption": [row[1] for row in rows],
            },
        ),
    ],
    ids=["cls", "json", "csv", "parquet"],
)
def test_labels_and_captions_are_both_kept(make, tmp_path):
    done = prepare(make(tmp_path), tmp_path / "out")
    labelled = open_source("tfds", "train", path=done.path, fields=(TEXT,))
    assert images_and_captions(labelled) == expected("train")
    labels = {labelled[i].image: labelled[i].labels for i in range(len(labelled))}
    assert labels == {
        picture(int(Path(name).stem)): ("ab".index(label),) for name, _, label in PAIRS["train"]
    }


def test_the_caption_key_chooses_among_several_captions(tmp_path):
    source = make_tars(tmp_path, lambda row: {**one_caption(row), **in_json(row)})
    for name, key, count in (("a", None, 1), ("b", "text", 3), ("c", "txt", 1)):
        done = prepare(source, tmp_path / "out", key, name=name)
        assert max(map(len, images_and_captions(opened(done, "train")).values())) == count
    with pytest.raises(UserError, match="16 of 16 images have no caption"):
        prepare(source, tmp_path / "out", "title", name="d")


def make_gaps(make: str, root: Path) -> Path:
    """Returns a data set in which images 3 and 4 have no caption."""

    def texts(row) -> list[str]:
        return [] if Path(row[0]).stem in "34" else row[1]

    if make == "tars":
        return make_tars(root, lambda row: {"txt": texts(row)[0].encode()} if texts(row) else {})
    if make == "json":
        return make_tars(root, lambda row: {"json": json.dumps({"text": texts(row)}).encode()})
    return write_parquet(root, lambda rows: {"caption": [(texts(row) or [" "])[0] for row in rows]})


@pytest.mark.parametrize(
    ("make", "first"),
    [
        ("tars", "train-00000.tar: 000000004.png, .*train-00001.tar: 000000003.png;"),
        ("json", "train-00000.tar: 000000004.png, "),
        ("parquet", "train-00000-of-00002.parquet:2, train-00001-of-00002.parquet:1;"),
    ],
)
def test_images_without_a_caption_are_counted_and_named_or_skipped(make, first, tmp_path):
    source = make_gaps(make, tmp_path)
    with pytest.raises(
        UserError, match=f"2 of 16 images have no caption or an empty one: .*{first}"
    ):
        prepare(source, tmp_path / "out")
    done = prepare(source, tmp_path / "out", skip_uncaptioned=True)
    assert done.splits == {"train": 10, "test": 4}
    assert done.left_out == {"images without a caption": 2}
    assert len(images_and_captions(opened(done, "train"))) == 10


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ({"txt": b"\xff\xfe"}, "000000012.png has a caption that is not valid UTF-8"),
        (
            {"txt": b"a" * (2**20 + 1)},
            "'000000012': its .txt has no caption that can be read: 1,048",
        ),
        ({"txt": "\u00e9".encode() * 2**19 + b"\n"}, "its .txt has no caption that can be read"),
        ({"json": b'{"caption": "a", "caption": 3}'}, "'000000012': the caption 3 is not a text"),
        ({"json": b"[" * 9000}, "'000000012': its .json"),
        ({"json": b'{"caption": [["a"]]}'}, r"'000000012': the caption \[\['a'\]\] is not a text"),
        (
            {"json": b'{"caption": "\\ud800"}'},
            "000000012.png has a caption that is not valid UTF-8",
        ),
    ],
    ids=range(7),
)
def test_hostile_captions_of_a_tar_are_one_line(notes, message, tmp_path):
    """The captions are in the third tar, which is not read to detect the kind of captions."""

    def of_row(row) -> dict[str, bytes]:
        return (
            notes if "12" in row[0] else one_caption(row) if "txt" in notes else all_captions(row)
        )

    with pytest.raises(UserError, match=message) as error:
        prepare(make_tars(tmp_path, of_row), tmp_path / "out")
    assert "\n" not in str(error.value)


def test_names_in_a_tar_with_captions_are_never_paths(tmp_path):
    (tmp_path / "wds").mkdir()
    with tarfile.open(tmp_path / "wds" / "train-0.tar", "w") as tar:
        for name in ("../../escaped", f"{tmp_path}/escaped"):
            add(tar, f"{name}.png", picture(1))
            add(tar, f"{name}.txt", b"a picture")
    before = set(tmp_path.rglob("*"))
    assert prepare(tmp_path / "wds", tmp_path / "out").splits == {"train": 2}
    new = set(tmp_path.rglob("*")) - before
    assert all((tmp_path / "out") in (path, *path.parents) for path in new)


def test_a_column_of_captions_must_be_in_all_files_and_have_texts(tmp_path):
    source = make_parquet(tmp_path)
    with pytest.raises(UserError, match="no column 'title' .*columns of texts are: captions"):
        prepare(source, tmp_path / "out", "title")
    with pytest.raises(UserError, match="the column 'image' has struct<.* and no texts"):
        prepare(source, tmp_path / "out", "image")
    file = source / "train-00001-of-00002.parquet"
    table = pyarrow.parquet.read_table(file)
    pyarrow.parquet.write_table(table.drop_columns("captions"), file)
    with pytest.raises(UserError, match=f"{file}: there is no column 'captions'"):
        prepare(source, tmp_path / "out")


class MiniCaptions(tfds.core.GeneratorBasedBuilder):
    """Captions as in TFDS's coco_captions: a sequence of mappings with `id` and `text`."""

    VERSION = tfds.core.Version("1.1.0")

    def _info(self):
        caption = {"id": np.int64, "text": tfds.features.Text()}
        features = {"image": tfds.features.Image(), "captions": tfds.features.Sequence(caption)}
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(self, manager):
        return {split: self._generate_examples(rows) for split, rows in PAIRS.items()}

    def _generate_examples(self, rows):
        for name, texts, _ in rows:
            captions = [{"id": i, "text": text} for i, text in enumerate(texts)]
            image = io.BytesIO(picture(int(Path(name).stem)))
            yield name, {"image": image, "captions": captions}


def make_tfds(data_dir: Path) -> Path:
    tfds.disable_progress_bar()
    MiniCaptions(data_dir=data_dir, file_format="array_record").download_and_prepare()
    return data_dir / "mini_captions" / "1.1.0"


def to_tfrecord(folder: Path) -> Path:
    """Converts a data set from ArrayRecord. TFDS would need TensorFlow for this."""

    def masked(data: bytes) -> bytes:
        crc = google_crc32c.value(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    for file in folder.glob("*.array_record-*"):
        records = ArrayRecordDataSource([str(file)])
        with open(str(file).replace("array_record", "tfrecord"), "wb") as out:
            for i in range(len(records)):
                size = struct.pack("<Q", len(records[i]))
                out.write(size + masked(size) + records[i] + masked(records[i]))
        file.unlink()
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    return folder


def test_captions_of_tfds_are_a_field(tmp_path):
    path = str(make_tfds(tmp_path))
    source = open_source("tfds", "train", path=path, labels=False, fields=(TEXT,))
    assert images_and_captions(source) == expected("train")
    assert images_and_captions(pickle.loads(pickle.dumps(source))) == expected("train")
    with pytest.raises(UserError, match="no captions 'title'.*caption_key=NAME.*captions/text"):
        open_source("tfds", "train", path=path, labels=False, fields=(TEXT,), caption_key="title")


def test_another_caption_of_tfds_is_other_data(tmp_path, monkeypatch):
    """The fingerprint does not read the example with the changed caption."""

    def fields_of(name, split):
        path = str(make_tfds(tmp_path / name))
        source = open_source("tfds", split, path=path, labels=False, fields=(TEXT,))
        return fingerprint(source, samples=0)["fields"]

    splits = ("train", "train[:8]+test", "train[2:][:4]", "test")
    first = [fields_of("first", split) for split in splits]
    assert [fields_of("same", split) for split in splits] == first
    rows = [(name, [*texts, "one more"], label) for name, texts, label in PAIRS["train"]]
    monkeypatch.setitem(PAIRS, "train", [*PAIRS["train"][:5], rows[5], *PAIRS["train"][6:]])
    changed = [
        fields_of("changed", split) == mark for split, mark in zip(splits, first, strict=True)
    ]
    assert changed == [False, False, False, True]


def test_examples_of_tfds_without_a_caption_are_named(tmp_path, monkeypatch):
    gaps = [(name, [] if name[7] in "47" else texts, "a") for name, texts, _ in PAIRS["train"]]
    monkeypatch.setitem(PAIRS, "train", gaps)
    path = make_tfds(tmp_path)
    source = open_source("tfds", "train", path=str(path), labels=False, fields=(TEXT,))
    first, _ = (i for i in range(12) if source[i].image in (picture(4), picture(7)))
    with pytest.raises(UserError, match=f"1.1.0 train example {first} has no caption"):
        source.fields_of(first)
    with pytest.raises(UserError, match=f"2 of 16 images have no caption.*: {path}/.*:{first}, "):
        prepare(to_tfrecord(path), tmp_path / "out")


def test_tfds_in_tfrecord_keeps_its_captions(tmp_path):
    source = to_tfrecord(make_tfds(tmp_path / "tfds"))
    done = prepare(source, tmp_path / "out")
    assert done.caption_key == "captions/text"
    assert images_and_captions(opened(done, "train")) == expected("train")
    assert (
        fingerprint(opened(done, "train"))["fields"] != fingerprint(opened(done, "test"))["fields"]
    )
    with pytest.raises(UserError, match="no texts 'objects' .*features of text are: captions/text"):
        prepare(source, tmp_path / "other", "objects")
