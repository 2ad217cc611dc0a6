"""The suite `detection` has the metrics of pycocotools; its page shows the worst images first."""

import contextlib
import io
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.image_files import find_images
from vit_jax.data.preprocess import TestCrop
from vit_jax.errors import UserError
from vit_jax.evaluation import dense_suite
from vit_jax.evaluation.dense_metrics import COCO_METRICS, Detections
from vit_jax.evaluation.suite import DenseHeads, Subject
from vit_jax.evaluation.suite_detection import SUITE
from vit_jax.evaluation.suite_fewshot import parse_sets
from vit_jax.object_files import write_objects
from vit_jax.parallel.mesh import make_mesh
from vit_jax.runs.suite_pages import write_suite_page

FILE = "instances_val.json"
NAMES = ("cat", "dog", "bird")
IDS = {"dog": 3, "cat": 17, "bird": 18}  # The order differs from that of the detector's classes.
pytestmark = pytest.mark.usefixtures("pycocotools")


@pytest.fixture(scope="module")
def pycocotools():
    return pytest.importorskip("pycocotools")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Writes images of several sizes, with objects whose areas are smaller than their boxes."""
    folder, rng = tmp_path_factory.mktemp("animals"), np.random.default_rng(0)
    rows = {"images": [], "annotations": []}
    rows["categories"] = [dict(id=number, name=name) for name, number in IDS.items()]
    for number in (40, 7, 12, 3, 29, 31):
        width, height = rng.integers(150, 320, 2).tolist()
        name = f"{number}.jpg"
        Image.new("RGB", (width, height), (number * 5,) * 3).save(folder / name)
        rows["images"].append(dict(id=number, file_name=name, height=height, width=width))
        for _ in range(0 if number == 12 else rng.integers(2, 8)):
            sides = rng.uniform(8, 140, 2).round(2)
            left, top = (rng.uniform(0, [width, height] - sides)).round(2).tolist()
            row = dict(id=100 + len(rows["annotations"]), image_id=number)
            row["category_id"] = int(rng.choice([*IDS.values()]))
            row |= dict(bbox=[left, top, *sides.tolist()], iscrowd=int(rng.random() < 0.15))
            row["area"] = float(sides.prod() * rng.uniform(0.3, 0.9))
            rows["annotations"].append(row)
    (folder / FILE).write_text(json.dumps(rows))
    return folder


def write(content, data, folder):
    """Writes a COCO file and the images of `data`."""
    folder.mkdir(exist_ok=True)
    for image in content["images"]:
        shutil.copy(data / image["file_name"], folder)
    (folder / FILE).write_text(json.dumps(content))


class Detector:
    """Predicts boxes near the true ones, some of them with another class."""

    class_names, image_size, predicts_masks = NAMES, (64, 64), False

    def __init__(self, data):
        content = json.loads((data / FILE).read_text())
        name_of = {number: name for name, number in IDS.items()}
        self.found = {}
        for image in content["images"]:
            rng = np.random.default_rng(image["id"])
            own = [x for x in content["annotations"] if x["image_id"] == image["id"]]
            boxes = np.array([x["bbox"] for x in own] + [[5, 6, 50, 40]] * 3, np.float32)
            corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
            corners += rng.normal(0, 4, corners.shape)
            corners = corners.clip(0, [image["width"], image["height"]] * 2)
            labels = [NAMES.index(name_of[x["category_id"]]) for x in own] + [0, 1, 2]
            labels = np.where(rng.random(len(labels)) < 0.8, labels, 0).astype(np.int32)
            scores = np.sort(rng.uniform(0.01, 1, len(labels)))[::-1].astype(np.float32)
            order = rng.permutation(len(labels))
            found = Detections(corners[order].astype(np.float32), labels[order], scores)
            self.found[image["file_name"]] = found

    def stream(self, source, on_unreadable, threshold=0.0):
        for index in range(len(source)):
            found = self.found[source.describe(index).rpartition("/")[2]]
            yield index, found.above(threshold)


def evaluated(data, **options):
    """Returns the rows of the suite's metrics by name, and the outputs that its page shows."""
    unused, outputs = (lambda: None), []
    crop = TestCrop(64, "fit", 64)
    dense = DenseHeads("detection", lambda task: Detector(data), unused)
    subject = Subject("RUN", make_mesh(), unused, unused, lambda: crop, unused, dense=dense)
    subject.on_outputs = outputs.append
    given = SUITE.defaults() | {"set": parse_sets([str(data)])} | options
    (measurement,) = SUITE.measurements(subject, given)
    rows = measurement.measure(subject, measurement.open(measurement.names))
    assert tuple(row.name for row in rows) == measurement.names
    return {row.name.rpartition(", ")[2]: row for row in rows}, outputs


def of_pycocotools(data, objects):
    """Returns pycocotools' metrics of the objects that `predict` wrote."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        true = COCO(str(data / FILE))
        ids = {image["file_name"]: image["id"] for image in true.dataset["images"]}
        files = {row["id"]: row["file_name"].rpartition("/")[2] for row in objects["images"]}
        names = {row["id"]: row["name"] for row in objects["categories"]}
        rows = [
            dict(
                image_id=ids[files[row["image_id"]]],
                category_id=IDS[names[row["category_id"]]],
                bbox=row["bbox"],
                score=row["score"],
            )
            for row in objects["annotations"]
        ]
        evaluation = COCOeval(true, true.loadRes(rows), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(COCO_METRICS, evaluation.stats, strict=True))


def test_metrics_are_those_of_pycocotools_on_the_users_file_and_predicts_objects(data, tmp_path):
    rows, _ = evaluated(data)
    write_objects(tmp_path, Detector(data), find_images([str(data)]), 1e-9, print, lambda *_: None)
    expected = of_pycocotools(data, json.loads((tmp_path / "objects.json").read_text()))
    found = {name: row.accuracy for name, row in rows.items()}
    assert found == pytest.approx(expected, abs=1e-9)
    # Objects are small, medium or large by the areas in the file.
    assert 0.1 < found["AP"] < 0.9 and len({found[f"AP{size}"] for size in "sml"}) == 3
    assert rows["AP"].images == 6 and rows["AP"].note == "fit 64x64, bilinear"


def test_areas_are_those_of_the_boxes_if_a_file_has_none(data, tmp_path):
    content = json.loads((data / FILE).read_text())
    for row in content["annotations"]:
        del row["area"]
    write(content, data, tmp_path)
    without = {name: row.accuracy for name, row in evaluated(tmp_path)[0].items()}
    stated = {name: row.accuracy for name, row in evaluated(data)[0].items()}
    assert without["AP"] == stated["AP"] and without["APs"] != stated["APs"]


def f1_of(found, boxes):
    """Returns the F1 of an image by its definition, without crowds."""
    kept = found.scores >= 0.3
    used, right = set(), 0
    for box, label in zip(found.corners[kept], found.labels[kept], strict=True):
        start = np.maximum(box[:2], boxes.corners[:, :2])
        shared = (np.minimum(box[2:], boxes.corners[:, 2:]) - start).clip(0).prod(1)
        areas = (boxes.corners[:, 2:] - boxes.corners[:, :2]).prod(1)
        ious = shared / (areas + (box[2:] - box[:2]).prod() - shared)
        ious[(boxes.labels != label) | np.isin(np.arange(len(areas)), [*used])] = 0
        if len(ious) and ious.max() >= 0.5:
            used.add(int(ious.argmax()))
            right += 1
    return 2 * right / max(kept.sum() + len(boxes.labels), 1)


def test_the_page_shows_true_and_predicted_boxes_with_the_lowest_f1_first(data, tmp_path):
    content = json.loads((data / FILE).read_text())
    for row in content["annotations"]:
        row["iscrowd"] = 0
    write(content, data, tmp_path)
    _, (outputs,) = evaluated(tmp_path)
    shown = [matches.f1 for _, matches, _ in outputs.shown]
    assert shown == sorted(shown) and len({*shown}) > 2
    for index, matches, found in outputs.shown:
        assert found.scores.min() >= 0.3
        boxes = outputs.source.fields_of(index)["boxes"]
        assert matches.f1 == pytest.approx(f1_of(found, boxes))
    page = write_suite_page(tmp_path, outputs).read_text()
    assert re.findall(r"F1 ([\d.]+)%", page) == [f"{100 * share:.1f}" for share in shown]
    assert page.count("<img") == 2 * len(shown) and "a score of 0.3 or more" in page


@pytest.mark.parametrize(
    ("splits", "expected"),
    [(("train", "valid"), "valid"), (("train", "val", "test"), "test"), (("train",), "train")],
)
def test_the_default_split_is_that_of_test_or_validation_images(tmp_path, splits, expected):
    for split in splits:
        (tmp_path / split).mkdir()
        (tmp_path / split / "_annotations.coco.json").touch()
    (described,), lines = parse_sets([str(tmp_path)]), []
    assert dense_suite.tested_set(described, "coco", {}, lines.append).test_split == expected
    said = f"has no split test: {expected} is evaluated"
    assert [said in line for line in lines] == ([] if expected == "test" else [True])


def test_other_classes_and_data_without_boxes_are_rejected(data, tmp_path):
    content = json.loads((data / FILE).read_text())
    content["categories"][0]["name"] = "horse"
    write(content, data, tmp_path / "horses")
    with pytest.raises(UserError, match="has classes that training lacks: horse"):
        evaluated(tmp_path / "horses")
    content["annotations"], content["categories"][0]["name"] = [], "dog"
    write(content, data, tmp_path / "empty")
    with pytest.raises(UserError, match="empty has no readable image with objects"):
        evaluated(tmp_path / "empty")
    with pytest.raises(UserError, match="the test data have no boxes: give a COCO file"):
        evaluated(data, set=parse_sets(["digits:"]))
