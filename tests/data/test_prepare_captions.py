"""Images with captions in every format become the same data set, and training reads its captions."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.data.test_prepare import picture, run
from vit_jax.data.fields import TEXT, Field, draw_caption
from vit_jax.data.pipeline import training_batches
from vit_jax.data.preprocess import TrainCrop
from vit_jax.data.sources import open_source
from vit_jax.data.sources.base import fingerprint
from vit_jax.errors import UserError
from vit_jax.preparation import readers, writer

# Captions of each image, and its class.
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
        writer_ = csv.writer(file)
        writer_.writerow(["file", "caption", *(["label"] if labels else [])])
        for name, captions, label in rows:
            writer_.writerows([name, caption, *([label] if labels else [])] for caption in captions)


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


def prepare(source, out: Path, caption_key=None, **options) -> writer.Prepared:
    found = readers.find(str(source), caption_key=caption_key)
    return writer.prepare(found, out, writer.Options(**options), run, run)


def opened(done: writer.Prepared, split: str, **options):
    return open_source("tfds", split, path=done.path, labels=False, fields=(TEXT,), **options)


def images_and_captions(source) -> dict[bytes, tuple[str, ...]]:
    return {source[i].image: source.fields_of(i)[TEXT] for i in range(len(source))}


def expected(split: str) -> dict[bytes, tuple[str, ...]]:
    return {picture(int(Path(name).stem)): tuple(texts) for name, texts, _ in PAIRS[split]}


@pytest.mark.parametrize("make", [make_csv, make_json_lines])
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
    """The changed caption is not among the examples that a fingerprint reads."""
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
