"""Detection for a user: training on COCO files, and predicting the objects of photographs."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

import vit_jax
from vit_jax.data.fields import Boxes
from vit_jax.data.map_files import run_lengths
from vit_jax.data.placement import Placement
from vit_jax.data.preprocess import TestCrop
from vit_jax.dense import detections, original_corners, original_logits
from vit_jax.evaluation.dense_metrics import coco_metrics
from vit_jax.evaluation.suite_fewshot import parse_sets
from vit_jax.models.dense.detector import Best, least_score
from vit_jax.run_suites import run_suites

CONFIG = "configs/detect.py:backbone=ViT-32x2/8,size=64"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Returns a data set of bright squares and bars, with a COCO file for each split."""
    folder = tmp_path_factory.mktemp("objects")
    for split, count in {"train": 24, "test": 6}.items():
        rows = {"images": [], "annotations": [], "categories": []}
        rows["categories"] = [{"id": 3, "name": "square"}, {"id": 7, "name": "bar"}]
        for number in range(count):
            rng = np.random.default_rng((number, split == "test"))
            image = rng.integers(0, 60, (60, 80, 3), dtype=np.uint8)
            label = number % 2
            width, height = ((20, 20), (30, 8))[label]
            left, top = int(rng.integers(0, 80 - width)), int(rng.integers(0, 60 - height))
            image[top : top + height, left : left + width] = 250
            file = folder / split / f"{number}.jpg"
            file.parent.mkdir(exist_ok=True)
            Image.fromarray(image).save(file, quality=95)
            rows["images"].append(dict(id=number, file_name=file.name, height=60, width=80))
            box = [left, top, width, height]
            row = dict(id=number, image_id=number, category_id=(3, 7)[label], bbox=box)
            right, bottom = left + width, top + height
            row["segmentation"] = [[left, top, right, top, right, bottom, left, bottom]]
            rows["annotations"].append(row | dict(area=width * height, iscrowd=0))
        (folder / split / "_annotations.coco.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture(scope="module")
def workdir(run, data, tmp_path_factory):
    """Returns the workdir of a short run."""
    pytest.importorskip("pycocotools")
    workdir = tmp_path_factory.mktemp("run") / "detector"
    values = dict(steps=3, batch_size=8, evaluate_every=3, log_every=1)
    values |= {"detection.dim": 32, "detection.depth": 1, "detection.queries": 10}
    values |= {
        "detection.most": 4,
        "detection.masks": True,
        "data.path": data,
        "optimizer.warmup_steps": 1,
    }
    values |= {"checkpoint.every": 3, "model.dtype": "float32"}
    flags = [f"--config.{name}={value}" for name, value in values.items()]
    result = run(f"--config={CONFIG}", *flags, f"--workdir={workdir}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "test ap50" in result.stdout and "test mask ap50" in result.stdout
    return workdir


@pytest.mark.slow
def test_predict_writes_a_coco_file_overlays_and_a_page(run, data, workdir, tmp_path):
    out = tmp_path / "detected"
    arguments = f"--checkpoint={workdir}", "--threshold=0.001", f"--out={out}"
    result = run(*arguments, str(data / "test"), module="vit_jax.predict")
    assert result.returncode == 0, result.stdout + result.stderr
    coco_masks = pytest.importorskip("pycocotools.mask")
    found = json.loads((out / "objects.json").read_text())
    assert [row["name"] for row in found["categories"]] == ["square", "bar"]
    assert len(found["images"]) == 6
    assert {(row["height"], row["width"]) for row in found["images"]} == {(60, 80)}
    # pycocotools uses id 0 for "no match".
    assert min(row["id"] for row in found["annotations"]) == 1
    for row in found["annotations"]:
        left, top, width, height = row["bbox"]
        assert 0 <= left <= left + width <= 80.001
        assert 0 <= top <= top + height <= 60.001
        assert row["score"] >= 0.001
        mask = coco_masks.decode(coco_masks.frPyObjects(row["segmentation"], 60, 80))
        assert mask.shape == (60, 80) and mask.sum() == row["area"]
    assert len(list((out / "overlays").iterdir())) == 6
    assert "<img" in (out / "index.html").read_text()
    again = run(*arguments, str(data / "test"), module="vit_jax.predict")
    assert again.returncode == 2
    assert "--overwrite" in again.stderr


@pytest.mark.slow
def test_the_report_starts_with_the_worst_images(workdir):
    report = (workdir / "report.html").read_text()
    start, end = report.index("Test images, the lowest F1 first"), report.index("<h2>Curves")
    assert report[start:end].count("<img") == 12 and "F1 0.0%" in report[start:end]


@pytest.mark.slow
def test_detector_finds_the_same_objects_as_the_command(data, workdir, run, tmp_path):
    detector = vit_jax.load_detector(workdir, log=str)
    assert detector.class_names == ("square", "bar")
    files = sorted((data / "test").glob("*.jpg"))
    each = detector.predict(files, threshold=0.0)
    assert len(each) == len(files)
    for found in each:
        assert np.all(np.diff(found.scores) <= 0)
        assert len(found.corners) == len(found.labels) == len(found.scores) == 20
        assert found.masks.shape == (20, 60, 80)
    with pytest.raises(vit_jax.UserError, match="has no segmentation head"):
        vit_jax.load_segmenter(workdir, log=str)


@pytest.mark.slow
def test_the_suite_measures_the_objects_of_the_detector(data, workdir, tmp_path):
    file = tmp_path / "near" / "instances_test.json"
    shutil.copytree(data / "test", file.parent)
    content = json.loads((file.parent / "_annotations.coco.json").read_text())
    images = [file.parent / row["file_name"] for row in content["images"]]
    found = vit_jax.load_detector(workdir, log=str).predict(images, threshold=0.0)
    content["annotations"], objects = [], []
    # Annotations are objects near some of the predicted ones.
    for number, each in enumerate(found):
        corners = np.concatenate([each.corners[:3, :2], each.corners[:3, 2:] - 1], axis=1)
        kept = (corners[:, 2:] > corners[:, :2]).all(1)
        corners, labels = corners[kept], each.labels[:3][kept]
        masks = np.roll(each.masks[:3][kept], 2, axis=1)
        objects.append(Boxes(corners, labels, masks))
        for (left, top, right, bottom), label, mask in zip(
            corners.tolist(), labels, masks, strict=True
        ):
            box = [left, top, right - left, bottom - top]
            row = dict(id=len(content["annotations"]), image_id=number, bbox=box)
            row |= dict(segmentation=run_lengths(mask), area=int(mask.sum()))
            content["annotations"].append(row | dict(category_id=(3, 7)[label]))
    file.write_text(json.dumps(content))
    (file.parent / "_annotations.coco.json").unlink()
    options, lines = {"set": parse_sets([str(file.parent)])}, []
    out = tmp_path / "out"
    results = run_suites(workdir, ["detection"], out, options=options, log=lines.append)
    expected = coco_metrics(found, objects, 2)
    of_masks = coco_metrics(found, objects, 2, masks=True)
    expected |= {f"mask {name}": value for name, value in of_masks.items()}
    rows = {name: row for (_, name), row in results.rows.items()}
    for name, value in expected.items():
        accuracy = rows[f"near, {name}"].accuracy
        assert accuracy == (pytest.approx(value) if value >= 0 else None), name
    assert expected["AP50"] > 0.1 and rows["near, APl"].note == "no object of this size"
    assert "F1 " in (out / "detection_near.html").read_text()
    again = []
    run_suites(workdir, ["detection"], out, options=options, log=again.append)
    assert any("near, APl" in line and "reused" in line for line in again)
    assert not any(line.startswith("page") for line in again)


@pytest.mark.parametrize("threshold", [0.0, 1.5])
def test_threshold_that_is_no_score_is_refused(threshold):
    with pytest.raises(vit_jax.UserError, match="--threshold is .*, and must be above 0"):
        least_score(threshold)


def test_corners_are_mapped_back_to_the_original_image():
    crop = TestCrop(64, "fit", 64)
    placement = crop.place(60, 80)
    assert isinstance(placement, Placement)
    boxes = np.array([[10.0, 20.0, 50.0, 40.0]], np.float32)
    shares = placement.place_boxes(boxes) / 64
    np.testing.assert_allclose(original_corners(shares, placement), boxes, atol=1e-4)


def test_scores_of_objects_contain_the_quality_of_their_masks():
    """The quality is computed as in Mask DINO, from the pixels of the image without its padding."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 16, 16)).astype(np.float32)
    # Rows 12 to 15 are padding with positive logits.
    logits[0] = np.where(np.arange(16)[:, None] < 12, -1.0, 2.0)
    boxes, probabilities = np.tile([0.1, 0.2, 0.5, 0.8], (4, 1)), np.array([0.9, 0.8, 0.7, 0.4])
    best = Best(probabilities, np.arange(4), boxes, logits)
    # The image is in the upper 12 rows of the logits.
    placement = TestCrop(64, "fit", 64).place(48, 64)
    found = detections(best, placement)
    enlarged = np.array([original_logits(each, placement) for each in logits])
    inside = enlarged > 0
    quality = (inside / (1 + np.exp(-enlarged))).sum((1, 2)) / (inside.sum((1, 2)) + 1e-6)
    assert quality[0] < 0.7 < 1 / (1 + np.exp(-2.0))
    order = np.argsort(-probabilities * quality)
    assert found.labels.tolist() == order.tolist() != [0, 1, 2, 3]
    np.testing.assert_allclose(found.scores, (probabilities * quality)[order], rtol=1e-5)
    np.testing.assert_array_equal(found.masks, inside[order])
    above = detections(best, placement, found.scores[1])
    np.testing.assert_array_equal(above.scores, found.scores[:2])


def test_masks_are_encoded_one_by_one():
    rng = np.random.default_rng(0)
    boxes = np.tile([0.1, 0.2, 0.5, 0.8], (3, 1))
    best = Best(np.array([0.9, 0.8, 0.1]), np.zeros(3), boxes, rng.normal(size=(3, 16, 16)))
    placement = TestCrop(64, "fit", 64).place(60, 80)
    expected = detections(best, placement, 0.3)
    encoded = detections(best, placement, 0.3, encode=run_lengths)
    assert encoded.masks.tolist() == [*map(run_lengths, expected.masks)]
    assert expected.masks.shape == (2, 60, 80)


@pytest.mark.parametrize("kind", ["fit", "short_side", "square"])
def test_masks_are_mapped_back_to_the_original_image(kind):
    crop = TestCrop(64, kind, 64)
    placement = crop.place(120, 160)
    rows, columns = np.indices((120, 160))
    inside = (rows >= 30) & (rows < 90) & (columns >= 50) & (columns < 110)
    placed = placement.place_map(inside, False, np.zeros((64, 64), bool))
    # The logits of a head with stride 4: one for every 4x4 pixels.
    logits = 20.0 * placed.reshape(16, 4, 16, 4).mean((1, 3)) - 10
    found = original_logits(logits, placement) > 0
    edge = 160 / 16  # Pixels per logit, at most.
    assert not found[(rows < 30 - edge) | (rows > 90 + edge)].any()
    assert not found[(columns < 50 - edge) | (columns > 110 + edge)].any()
    middle = (np.abs(rows - 59.5) < 30 - edge) & (np.abs(columns - 79.5) < 30 - edge)
    assert found[middle].all()
    assert abs(found.sum() / inside.sum() - 1) < 0.1
    everywhere = original_logits(np.ones((16, 16)), placement) > 0
    box = placement.box
    assert everywhere.sum() == pytest.approx((box.bottom - box.top) * (box.right - box.left))
