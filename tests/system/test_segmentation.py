"""A segmentation run is loaded, and used for images of any size."""

import base64
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from PIL import Image

import vit_jax
from tests.shapes import NAMES, config_of_shapes, draw, segmentation_run, shapes, write_shapes
from vit_jax.data.fields import IGNORED
from vit_jax.data.preprocess import TestCrop
from vit_jax.evaluation.dense_metrics import confusion, segmentation_metrics
from vit_jax.evaluation.suite_fewshot import parse_sets
from vit_jax.inspection.class_maps import overlay
from vit_jax.mask_files import mask_names
from vit_jax.run_suites import run_suites

__all__ = ["segmentation_run", "shapes"]  # Fixtures.


@pytest.fixture(scope="module")
def segmenter(segmentation_run):
    return vit_jax.load_segmenter(segmentation_run[0], log=str)


@pytest.fixture(scope="module")
def drawn():
    """Returns the test images with their masks."""
    return [draw(index) for index in range(1000, 1012)]


def metrics_of(predicted, masks):
    pairs = zip(predicted, masks, strict=True)
    return segmentation_metrics(sum(confusion(*pair, len(NAMES)) for pair in pairs))


def test_a_loaded_segmenter_predicts_masks_of_the_images_size(segmentation_run, segmenter, drawn):
    images, masks = zip(*drawn, strict=True)
    predicted = segmenter.predict(list(images))
    assert segmenter.class_names == NAMES
    assert all(found.dtype == np.uint8 for found in predicted)
    assert [found.shape for found in predicted] == [mask.shape for mask in masks]
    # The run's evaluation is worse, because it shrinks each image to one window.
    of_run = segmentation_run[1]["miou"]
    assert metrics_of(predicted, masks).miou > max(0.6, of_run)
    assert metrics_of(segmenter.predict(list(images), whole=True), masks).miou > 0.5


def test_the_result_does_not_depend_on_the_other_images(segmenter, drawn):
    (image, _), *others = drawn
    together = segmenter.predict([image, *(other for other, _ in others)])
    assert (segmenter.predict(image)[0] == together[0]).all()


def test_changed_parameters_are_used(segmentation_run, drawn):
    segmenter = vit_jax.load_segmenter(f"{segmentation_run[0]}@40", log=str)
    image = drawn[0][0]
    assert (segmenter.predict(image)[0] != 2).any()
    bias = segmenter.head.classifier.bias
    bias[...] = bias[...].at[2].set(1e6)
    assert (segmenter.predict(image)[0] == 2).all()


def test_windows_may_have_another_size(segmentation_run, drawn):
    segmenter = vit_jax.load_segmenter(segmentation_run[0], image_size=64, log=str)
    assert segmenter(np.zeros((1, 64, 64, 3), np.uint8)).shape == (1, 8, 8, 3)
    image, mask = drawn[0]
    assert segmenter.predict(image)[0].shape == mask.shape


def test_a_damaged_file_is_named(segmenter, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    Image.fromarray(draw(0)[0]).save(tmp_path / "b.png")
    with pytest.raises(vit_jax.UserError, match=r"cannot read .*a\.png: not one of the formats"):
        segmenter.predict([tmp_path / "b.png", tmp_path / "a.png"])


def test_a_checkpoint_without_a_head_is_rejected(tmp_path):
    model = vit_jax.create_model("ViT-Ti/16", num_classes=0, image_size=32, depth=1)
    vit_jax.save_model(model, tmp_path / "model")
    with pytest.raises(vit_jax.UserError, match="has no segmentation head: give the workdir of"):
        vit_jax.load_segmenter(tmp_path / "model", log=str)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Returns a folder of images and a damaged file.

    Two images have the same name in different folders, and two have names with different suffixes.
    """
    folder = tmp_path_factory.mktemp("photos")
    (folder / "more").mkdir()
    for index, name in enumerate(["a.png", "b.png", "b.bmp", "more/a.png", "more/c.webp"]):
        Image.fromarray(draw(1000 + index)[0]).save(folder / name, lossless=True)
    (folder / "broken.jpg").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def written(run, segmentation_run, photos, tmp_path_factory):
    """Returns the finished `predict` process, and its output folder."""
    folder = tmp_path_factory.mktemp("out") / "found"
    checkpoint = f"--checkpoint={segmentation_run[0]}"
    done = run(checkpoint, photos, f"--out={folder}", module="vit_jax.predict")
    return done, folder


def test_predict_writes_masks_overlays_and_a_page(written, photos, segmenter):
    done, folder = written
    assert done.returncode == 3, done.stderr  # The exit code of a skipped image.
    assert "unreadable image skipped" in done.stderr and "broken.jpg" in done.stderr
    masks = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    # The suffix is kept if names would otherwise be the same.
    names = ["a", "b.bmp", "b.png", "more/a", "more/c"]
    images = ["a.png", "b.bmp", "b.png", "more/a.png", "more/c.webp"]
    assert masks == [f"masks/{name}.png" for name in names]
    for name, image in zip(names, images, strict=True):
        mask = Image.open(folder / "masks" / f"{name}.png")
        assert mask.mode == "P"
        assert (np.asarray(mask) == segmenter.predict(photos / image)[0]).all()
        assert Image.open(folder / "overlays" / f"{name}.jpg").size == mask.size
    page = (folder / "index.html").read_text()
    assert "5 segmented images" in page and "#800000" in page and page.count("<figure>") == 5


def test_no_mask_replaces_that_of_another_image():
    images = ["/a/x.jpg", "/a/x.png", "/a/x.png.jpg", "/a/y.jpg"]
    assert mask_names(images) == ["x.jpg", "x.png", "x.png.jpg", "y.jpg"]
    assert mask_names(images[1:]) == ["x", "x.png", "y"]


def test_predict_prints_the_shares_of_the_classes(written, photos):
    lines = written[0].stdout.splitlines()
    assert len(lines) == 5 and lines[0].startswith(f"{photos}/a.png  background ")
    shares = [float(word[:-1]) for line in lines for word in line.split() if word.endswith("%")]
    assert 400 < sum(shares) <= 501


def test_predict_does_not_overwrite_by_default(run, segmentation_run, written, photos):
    arguments = f"--checkpoint={segmentation_run[0]}", photos / "a.png", f"--out={written[1]}"
    done = run(*arguments, module="vit_jax.predict")
    assert done.returncode == 2 and "exists and has files; give --overwrite" in done.stderr
    done = run(*arguments, "--overwrite", module="vit_jax.predict")
    assert done.returncode == 0, done.stderr


def test_flags_of_classifiers_are_rejected(run, segmentation_run, photos):
    checkpoint = f"--checkpoint={segmentation_run[0]}"
    done = run(checkpoint, photos, "--top=3", module="vit_jax.predict")
    assert done.returncode == 2
    assert "--top is unsupported with a segmentation run" in done.stderr


@pytest.fixture(scope="module")
def evaluated(segmentation_run, shapes, tmp_path_factory):
    """Returns the output of the suite, its results and their folder."""
    out = tmp_path_factory.mktemp("evaluated") / "results"
    lines = []
    options = {"set": parse_sets([str(shapes)])}
    results = run_suites(
        segmentation_run[0], ["segmentation"], out, options=options, log=lines.append
    )
    return lines, results, out


def test_the_suite_gives_the_metrics_of_the_predicted_masks(evaluated, segmenter, drawn, shapes):
    images, masks = zip(*drawn, strict=True)
    expected = metrics_of(segmenter.predict(list(images)), masks)
    rows = {name: row for (_, name), row in evaluated[1].rows.items()}
    for name, value in zip(("mIoU", "mean accuracy", "pixel accuracy"), expected, strict=False):
        row = rows[f"{shapes.name}, {name}"]
        assert row.accuracy == pytest.approx(value) and row.images == 12


@pytest.mark.slow
def test_a_checkpoint_without_a_head_gets_a_linear_probe(drawn, tmp_path):
    shapes, lines = write_shapes(tmp_path / "shapes"), []
    model = vit_jax.create_model("ViT-32x1/8", num_classes=0, image_size=32)
    vit_jax.save_model(model, tmp_path / "backbone")

    def evaluate():
        lines.clear()
        options = {"set": parse_sets([str(shapes)]), "segmentation_steps": 20}
        results = run_suites(
            tmp_path / "backbone", ["segmentation"], tmp_path / "out", options=options,
            log=lines.append,
        )  # fmt: skip
        return {name: row for (_, name), row in results.rows.items()}

    row = evaluate()["shapes, mIoU"]
    assert row.note.startswith("linear probe of 20 steps, windows of 32x32")
    (workdir,) = (tmp_path / "out" / "segmentation").iterdir()
    images, masks = zip(*drawn, strict=True)
    segmenter = vit_jax.load_segmenter(workdir, log=str)
    assert row.accuracy == pytest.approx(metrics_of(segmenter.predict(list(images)), masks).miou)
    for path, values in nnx.to_flat_state(nnx.state(model)):
        frozen = dict(nnx.to_flat_state(nnx.state(segmenter.model)))[path]
        np.testing.assert_array_equal(values.get_value(), frozen.get_value())
    evaluate()
    assert any("mIoU" in line and "reused" in line for line in lines)
    (shapes / "images" / "train" / "0.png").unlink()
    (shapes / "masks" / "train" / "0.png").unlink()
    again = evaluate()["shapes, mIoU"]
    assert any("recomputed, since the data have changed" in line for line in lines)
    assert again.accuracy is not None and again.note == row.note


def test_a_linear_probe_needs_images_to_train_on(tmp_path):
    shapes, out = write_shapes(tmp_path / "shapes"), tmp_path / "out"
    for kind in ("images", "masks"):
        (shapes / kind / "train").rename(shapes / kind / "test")
    vit_jax.save_model(
        vit_jax.create_model("ViT-32x1/8", num_classes=0, image_size=32), tmp_path / "backbone"
    )
    options = {"set": parse_sets([str(shapes)])}
    results = run_suites(tmp_path / "backbone", ["segmentation"], out, options=options, log=str)
    for row in results.rows.values():
        assert "has no splits to train and to test a linear probe on; give them, as" in row.note


def test_the_page_shows_the_worst_images_first(evaluated, segmenter, drawn):
    (page,) = evaluated[2].glob("segmentation_*.html")
    shown = [float(share) for share in re.findall(r"mIoU ([\d.]+)%", page.read_text())]
    ious = [metrics_of(segmenter.predict(image), [mask]).miou for image, mask in drawn]
    np.testing.assert_allclose(shown, np.sort(ious) * 100, atol=0.051)


def test_a_second_evaluation_is_reused(evaluated, segmentation_run, shapes):
    options, lines = {"set": parse_sets([str(shapes)])}, []
    run_suites(
        segmentation_run[0], ["segmentation"], evaluated[2], options=options, log=lines.append
    )
    assert any("reused from" in line for line in lines)


def test_other_classes_and_missing_masks_are_rejected(segmentation_run, shapes, tmp_path):
    write_shapes(tmp_path / "other")
    for names, words in {
        "a\nb\nc\nd": "other has 4 classes, and the segmenter 3",
        "background\nblue\nred": "a class 'blue' where the segmenter has 'red'",
    }.items():
        (tmp_path / "other" / "classes.txt").write_text(names)
        sets = parse_sets([str(tmp_path / "other")])
        results = run_suites(
            segmentation_run[0],
            ["segmentation"],
            tmp_path / f"out{len(names)}",
            options={"set": sets},
            log=str,
        )
        assert words in results.markdown()


def test_the_report_shows_test_images_with_true_and_predicted_classes(segmentation_run):
    report = (segmentation_run[0] / "report.html").read_text()
    assert "Test images: original, true classes, predicted classes" in report
    drawn = np.asarray(Image.open(segmentation_run[0] / "reconstructions" / "40.png"), int)
    original, true, predicted = np.split(drawn, 3)
    # The overlays of true and predicted classes cover mostly the same part of each image.
    covered = (original != true).any(-1), (original != predicted).any(-1)
    assert 0.02 < covered[0].mean() < 0.6
    assert (covered[0] == covered[1]).mean() > 0.8


def pixels_of(address):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))))


def classes_of(original, drawn):
    """Returns the class of each pixel of an overlay by its colour."""
    labels = np.array([*range(len(NAMES)), IGNORED], np.uint8)
    overlays = [overlay(original, np.full(original.shape[:2], k, np.uint8)) for k in labels]
    distances = [np.abs(each.astype(int) - drawn).sum(-1) for each in overlays]
    return labels[np.argmin(distances, axis=0)]


def test_the_report_starts_with_the_worst_images_of_the_last_evaluation(segmentation_run, shapes):
    worst = json.loads((segmentation_run[0] / "worst_images.json").read_text())
    assert worst["title"] == "Test images, the lowest mIoU first"
    assert worst["legend"] == dict(zip(NAMES, ("#000000", "#800000", "#008000"), strict=True))
    figures, crop = worst["figures"], TestCrop(32, "fit", 32, interpolation="area")
    shares = [float(figure["caption"].removeprefix("mIoU ")[:-1]) for figure in figures]
    assert shares == sorted(shares) and len({figure["name"] for figure in figures}) == 12
    for figure, share in zip(figures, shares, strict=True):
        original, true, predicted = map(pixels_of, figure["pictures"])
        assert (original == crop(Path(figure["name"]).read_bytes())).all()
        true, predicted = (classes_of(original, drawn) for drawn in (true, predicted))
        assert metrics_of([predicted], [true]).miou == pytest.approx(share / 100, abs=6e-4)
    report = (segmentation_run[0] / "report.html").read_text()
    places = [report.index(f"{figure['caption']}<") for figure in figures]
    assert places == sorted(places) and places[-1] < report.index("<h2>Curves")


def config_that_continues(workdir, folder):
    """Returns the config of a run that trains one step from the parameters of another run."""
    config = config_of_shapes(folder)
    config.model.name, config.finetune.checkpoint = "", str(workdir)
    config.model.update(dict.fromkeys(("dim", "depth", "mlp_dim", "heads")))
    config.finetune.objective, config.steps, config.optimizer.warmup_steps = "kept", 1, 0
    return config


@pytest.mark.slow
def test_a_run_that_continues_a_head_keeps_its_running_statistics(
    segmentation_run, segmenter, shapes, tmp_path
):
    vit_jax.train(config_that_continues(segmentation_run[0], shapes), tmp_path / "run")
    continued = vit_jax.load_segmenter(tmp_path / "run", log=str)
    before, after = (each.statistics["norm"]["mean"][...] for each in (segmenter, continued))
    # One step replaces a tenth of the statistics. New statistics would start with a mean of 0.
    assert np.abs(before - after).max() < 0.3 * np.abs(before).max()


@pytest.mark.slow
def test_a_run_of_low_rank_changes_is_loaded_with_its_head(segmentation_run, shapes, tmp_path):
    config = config_that_continues(segmentation_run[0], shapes)
    config.finetune.train, config.finetune.lora_rank, config.steps = "lora", 2, 2
    vit_jax.train(config, tmp_path / "run")
    image = np.full((1, 32, 32, 3), 90, np.uint8)
    before, after = (
        vit_jax.load_segmenter(workdir, log=str)
        for workdir in (segmentation_run[0], tmp_path / "run")
    )
    assert np.abs(before.head.classifier.kernel - after.head.classifier.kernel).max() > 0
    features = [each.model.features(image) for each in (before, after)]
    assert np.abs(np.subtract(*features)).max() > 1e-4


def test_a_head_whose_classes_have_other_numbers_in_the_data_is_not_continued(
    segmentation_run, shapes, tmp_path
):
    """The continued head would predict red where the data have blue."""
    folder = shutil.copytree(shapes, tmp_path / "shapes")
    (folder / "classes.txt").write_text("background\nblue\nred\n")
    config = config_that_continues(segmentation_run[0], folder)
    with pytest.raises(vit_jax.UserError, match="classes in another order, background, red, blue"):
        vit_jax.train(config, tmp_path / "run")
    (folder / "classes.txt").write_text("background\nblue\ngreen\n")
    with pytest.raises(vit_jax.UserError, match="class 1 is 'red', that of the data 'blue'"):
        vit_jax.train(config, tmp_path / "run")
