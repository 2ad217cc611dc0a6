"""Tests of ImageNet's test sets: correct predictions, and errors for invalid data."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from tests.data.prepared import prepare
from vit_jax.data.pipeline import evaluation_batches
from vit_jax.errors import UserError
from vit_jax.evaluation import imagenet
from vit_jax.evaluation.imagenet import (
    accuracy,
    match_head,
    objectnet_crop,
    open_imagenet,
    open_objectnet,
    read_objectnet_map,
    read_real,
)

SYNSETS = tfds.builder("imagenet2012", try_gcs=False).info.features["label"].names


def test_accuracy_equals_counting():
    rng = np.random.default_rng(0)
    predictions = np.argsort(rng.random((200, 12)), axis=1)[:, :5]
    sets = [tuple(rng.choice(12, size=rng.integers(4), replace=False).tolist()) for _ in range(200)]
    labels = np.full((200, 3), -1)
    for row, classes in zip(labels, sets, strict=True):
        row[: len(classes)] = classes
    scored = [
        (p.tolist(), classes) for p, classes in zip(predictions, sets, strict=True) if classes
    ]
    assert accuracy(predictions, labels) == {
        "top1": pytest.approx(np.mean([p[0] in classes for p, classes in scored])),
        "top5": pytest.approx(np.mean([bool({*p} & {*classes}) for p, classes in scored])),
        "images": len(scored),
    }
    assert len(scored) < 200


def test_first_predictions_alone_have_no_top5():
    figures = accuracy(np.array([[3], [4]]), np.array([[3, 4], [5, -1]]))
    assert figures == {"top1": 0.5, "images": 2}


def test_padding_is_never_right():
    assert accuracy(np.array([[-1]]), np.array([[2, -1]])) == {"top1": 0.0, "images": 1}


@pytest.mark.parametrize("classes", [10, 1001, 21843])
def test_model_of_other_classes_is_refused(classes):
    with pytest.raises(UserError, match=f"ckpt predicts {classes:,} classes, ImageNet has 1,000"):
        match_head(classes, (), "ckpt")


def test_classes_in_another_order_or_with_other_names_are_matched():
    order = np.random.default_rng(0).permutation(1000)
    match = match_head(1000, [SYNSETS[k] for k in order], "ckpt")
    np.testing.assert_array_equal(order[match.order], np.arange(1000))
    assert "ckpt has the data's classes in another order" in match.note
    match = match_head(1000, [f"name {k}" for k in range(1000)], "ckpt")
    assert "'name 0' is 'n01440764' here, " in match.note and "and 997 more" in match.note
    with pytest.raises(
        UserError, match="its class 1 is 'n01484850', that of the data 'n01443537'.*fine-tune it"
    ):
        match_head(1000, [*SYNSETS[1:], "cat"], "ckpt")


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> str:
    """Writes labels in which validation image n has n % 3 right classes: n % 1000 and the next."""
    entries = [[(n + i) % 1000 for i in range(n % 3)] for n in range(1, 50_001)]
    path = tmp_path_factory.mktemp("real") / "real.json"
    path.write_text(json.dumps(entries))
    return str(path)


def validation(number: int) -> dict:
    return dict(label=7 * number, file_name=f"ILSVRC2012_val_{50_000 - number:08}.JPEG")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tfds")
    prepare("imagenet2012", folder, {"validation": 12}, validation)
    return folder


def test_labels_are_the_images_class_followed_by_reals_classes(real, data_dir):
    source = open_imagenet("tfds", f"imagenet2012:{data_dir}", "validation", read_real(real))
    assert len(source) == 12 and source.max_labels == 3
    found = {source[index].labels for index in range(12)}
    assert found == {
        (7 * n, *((50_000 - n + i) % 1000 for i in range((50_000 - n) % 3))) for n in range(12)
    }


def test_one_pass_scores_both_labels(real, data_dir):
    source = open_imagenet("tfds", f"imagenet2012:{data_dir}", "validation", read_real(real))
    crop = objectnet_crop(8)
    (batch,) = evaluation_batches(source, batch_size=16, crop=crop, workers=0)
    labels = batch["labels"]
    own = np.where(labels[:, :1] >= 0, labels[:, :1], 0)
    assert accuracy(own, labels[:, :1]) == {
        "top1": 1.0,
        "images": 12,
    }  # The batch's padding is not counted.
    assert accuracy(own, labels[:, 1:])["images"] == sum((50_000 - n) % 3 > 0 for n in range(12))


def test_images_without_real_have_one_label(data_dir):
    source = open_imagenet("tfds", f"imagenet2012:{data_dir}", "validation[:5]")
    assert len(source) == 5 and {len(source[i].labels) for i in range(5)} == {1}


@pytest.fixture
def folder(tmp_path) -> Path:
    for number, synset in enumerate(SYNSETS):
        path = tmp_path / "val" / synset
        path.mkdir(parents=True)
        (path / f"ILSVRC2012_val_{number + 1:08}.JPEG").write_bytes(b"")
    return tmp_path


def test_a_folder_of_synsets_can_be_read(folder, real):
    source = open_imagenet("folder", str(folder), "val", read_real(real))
    for index in (0, 1, 999):
        n = index + 1
        assert source[index].labels == (index, *((n + i) % 1000 for i in range(n % 3)))


def test_slices_of_a_folder_of_synsets_are_random_and_disjoint(folder, real):
    parts = [open_imagenet("folder", str(folder), split) for split in ("val[:90%]", "val[90%:]")]
    held_out = parts[1].label_table()[:, 0]
    assert (len(parts[0]), len(held_out)) == (900, 100)
    assert sorted([*parts[0].label_table()[:, 0], *held_out]) == list(range(1000))
    assert 25 < np.mean(np.sort(held_out) < 500) * 100 < 75


def test_the_error_about_an_image_without_a_number_names_it(folder, real):
    (folder / "val" / SYNSETS[3] / "cat.jpg").write_bytes(b"")
    with pytest.raises(
        UserError, match="no labels for an image 'cat.jpg'.*ILSVRC2012_val_00050000"
    ):
        open_imagenet("folder", str(folder), "val", read_real(real))


def test_the_error_about_other_classes_names_them(folder):
    (folder / "val" / SYNSETS[3]).rename(folder / "val" / "n01491362")
    with pytest.raises(UserError, match="class 3 of .* is 'n01491362', in ImageNet 'n01491361'"):
        open_imagenet("folder", str(folder), "val")


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "cannot read .*real.json .*, ReaL's labels, which are at https://"),
        ("[[1]", "real.json is not JSON .*https://"),
        ('{"1": [2]}', "real.json contains a dict, not a list: .*https://"),
        ("[[1], [2]]", "real.json has 2 entries, ReaL 50,000"),
        (
            json.dumps([[]] * 49_999 + [[1000]]),
            r"entry 50,000 of .*real.json is \[1000\], not a list of",
        ),
        (
            json.dumps([[]] * 49_999 + [7]),
            "entry 50,000 of .*real.json is 7, not a list of classes",
        ),
    ],
)
def test_bad_real_file_is_refused(text, message, tmp_path):
    path = tmp_path / "real.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_real(str(path))


def write_map(root: Path) -> dict[str, tuple[int, ...]]:
    """Writes a map of 113 classes and one that ImageNet lacks; returns each folder's classes."""
    lines = np.random.default_rng(0).permutation(
        1000
    )  # The lines of ImageNet's classes in the list of labels.
    labels = [f"label {label}, {label}th" for label in np.argsort(lines)]
    right = {f"folder_{n}": (n, 500 + n) if n % 4 == 0 else (n,) for n in range(113)}
    maps = {
        "folder_to_objectnet_label": {f"folder_{n}": f"Class {n}" for n in range(114)},
        "objectnet_to_imagenet_1k": {
            f"Class {n}": "; ".join(labels[lines[label]] for label in right[f"folder_{n}"])
            for n in range(113)
        },
        "pytorch_to_imagenet_2012_id": {str(label): int(line) for label, line in enumerate(lines)},
    }
    (root / "mappings").mkdir()
    for name, value in maps.items():
        (root / "mappings" / f"{name}.json").write_text(json.dumps(value))
    (root / "mappings" / "imagenet_to_label_2012_v2").write_text(
        "".join(f"{label}\n" for label in labels)
    )
    return right


def write_images(root: Path) -> None:
    """Writes an image for each of the 114 classes, with a red border."""
    for n in range(114):
        pixels = np.full((6, 7, 3), (255, 0, 0), np.uint8)
        pixels[1:-1, 1:-1] = n
        path = root / "images" / f"folder_{n}" / "0.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(pixels).save(path)


def test_objectnet_has_the_images_of_imagenets_classes_without_their_border(tmp_path):
    right = write_map(tmp_path)
    write_images(tmp_path)
    source = open_objectnet(str(tmp_path))
    assert len(source) == 113 and source.max_labels == 2
    for index in range(113):
        image, labels = source[index]
        assert image.shape == (4, 5, 3)
        (shade,) = np.unique(image)
        assert labels == right[f"folder_{shade}"]


def test_prediction_outside_the_overlap_is_wrong(tmp_path):
    write_map(tmp_path)
    right = read_objectnet_map(str(tmp_path))
    labels = np.array([right["folder_0"], (*right["folder_1"], -1)])
    outside = 900
    figures = accuracy(np.array([[outside, 500, 1, 2, 3], [1, 2, 3, 4, 5]]), labels)
    assert figures == {"top1": 0.5, "top5": 1.0, "images": 2}


def test_objectnet_crop_is_480_of_512():
    assert (objectnet_crop(480).resize, objectnet_crop(384).resize) == (512, 410)


@pytest.mark.parametrize(
    "name",
    [
        "folder_to_objectnet_label.json",
        "objectnet_to_imagenet_1k.json",
        "pytorch_to_imagenet_2012_id.json",
        "imagenet_to_label_2012_v2",
    ],
)
def test_the_error_about_a_missing_file_of_the_class_map_names_it(name, tmp_path):
    write_map(tmp_path)
    (tmp_path / "mappings" / name).unlink()
    with pytest.raises(UserError, match=f"cannot read .*{name} .*unpack all of objectnet-1.0.zip"):
        read_objectnet_map(str(tmp_path))


@pytest.mark.parametrize(
    "file, change, message",
    [
        (
            "objectnet_to_imagenet_1k.json",
            {"Class 5": "no label"},
            "no line 'no label', which .* 'Class 5'",
        ),
        (
            "objectnet_to_imagenet_1k.json",
            {"Class 113": "label 3, 3th"},
            "has 114 classes, not 113",
        ),
        (
            "folder_to_objectnet_label.json",
            {"folder_5": "Class V"},
            "no folder of the class 'Class 5'",
        ),
        ("pytorch_to_imagenet_2012_id.json", {"5": 1000}, "must number the 1,000 lines of"),
    ],
)
def test_inconsistent_class_maps_are_refused(file, change, message, tmp_path):
    write_map(tmp_path)
    path = tmp_path / "mappings" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message):
        read_objectnet_map(str(tmp_path))


def test_the_error_about_a_class_without_images_names_it(tmp_path):
    write_map(tmp_path)
    write_images(tmp_path)
    (tmp_path / "images" / "folder_7" / "0.png").unlink()
    (tmp_path / "images" / "folder_7").rmdir()
    with pytest.raises(UserError, match="no images of folder_7: unpack all"):
        open_objectnet(str(tmp_path))


def test_imagenet_v2_is_a_data_set_of_imagenets_classes(tmp_path):
    from vit_jax.data.sources import open_source

    prepare(imagenet.IMAGENET_V2, tmp_path, {"test": 4})
    source = open_source("tfds", "test", path=f"{imagenet.IMAGENET_V2}:{tmp_path}")
    imagenet.check_classes(source.class_names, "ImageNet-v2")
    assert {source[i].labels for i in range(4)} == {(0,), (1,), (2,), (3,)}
