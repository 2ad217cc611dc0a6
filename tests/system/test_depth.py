"""A run that learns the depth of foggy scenes, and the uses of its checkpoint."""

import base64
import contextlib
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.system.test_serve import Server
from vit_jax.config import base_config
from vit_jax.errors import UserError
from vit_jax.evaluation.dense_metrics import depth_metrics
from vit_jax.evaluation.suite_fewshot import parse_sets
from vit_jax.run_suites import run_suites

UNIT = 1 / 256  # Metres per unit of the depth maps. This is not the default.


def scene(index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns an image of a scene in fog, and the scene's depth in metres.

    The scene is a floor up to the horizon with two boxes. Distant colours are paler.
    """
    rng = np.random.default_rng(index)
    height, width = rng.integers(40, 80, 2)
    depth = np.repeat(np.linspace(8, 1.5, height)[:, None], width, 1).astype(np.float32)
    colours = np.full((height, width, 3), (60, 70, 50), np.float32)
    for distance in sorted(rng.uniform(1, 7, 2), reverse=True):
        top, left = rng.integers(0, (height - 20, width - 20))
        depth[top : top + 20, left : left + 20] = distance
        colours[top : top + 20, left : left + 20] = rng.uniform(0, 90, 3)
    seen = np.exp(-depth / 4)[..., None]
    image = colours * seen + 230 * (1 - seen) + rng.normal(0, 4, colours.shape)
    depth[:2] = 0  # The depth of these rows is unknown.
    return image.clip(0, 255).astype(np.uint8), depth


def write_scenes(folder: Path) -> Path:
    """Writes 64 scenes for training and 8 for validation, with depths in `UNIT`."""
    for split, start, images in (("train", 0, 64), ("val", 1000, 8)):
        for kind in ("images", "depth"):
            (folder / kind / split).mkdir(parents=True)
        for index in range(start, start + images):
            image, depth = scene(index)
            Image.fromarray(image).save(folder / "images" / split / f"{index}.png")
            units = np.round(depth / UNIT).astype(np.uint16)
            Image.fromarray(units).save(folder / "depth" / split / f"{index}.png")
    return folder


def config_of_scenes(folder: Path):
    """Returns the config of a run that learns the depth of scenes."""
    config = base_config()
    config.model.name = "ViT-Ti/8"
    config.model.update(dict(dim=32, depth=2, mlp_dim=64, heads=2))
    config.objective.name = "depth"
    config.depth.update(dict(bins=32, upsample=2))
    config.data.update(dict(source="depth", path=str(folder), test_split="val"))
    config.data.depth_scale = UNIT
    config.data.update(dict(image_size=32, test_resize=32, crop_scale=(1.0, 1.0)))
    config.data.update(dict(crop="scale_jitter", test_crop="fit", workers=0, interpolation="area"))
    config.batch_size, config.steps, config.log_every = 16, 60, 20
    config.depth.scale_steps = 5
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 1e-2, 5
    config.evaluate_every = config.checkpoint.every = 60
    return config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the run's workdir, final metrics and output."""
    folder, printed = tmp_path_factory.mktemp("depth"), io.StringIO()
    config = config_of_scenes(write_scenes(folder / "scenes"))
    with contextlib.redirect_stdout(printed):
        figures = vit_jax.train(config, folder / "run")
    return folder / "run", figures, printed.getvalue()


@pytest.fixture(scope="module")
def model(trained):
    return vit_jax.load_depth(trained[0], log=str)


def test_the_run_learns_and_its_model_predicts_metres(trained, model):
    _, figures, printed = trained
    assert "trains   depth, depths from 0.001 to 10 metres, 1,120 parameters of its own" in printed
    assert figures["delta1"] > 0.6 and figures["rmse"] < 1.5, figures
    scenes = [scene(1000 + index) for index in range(8)]
    predicted = model.predict([image for image, _ in scenes])
    for found, (image, depth) in zip(predicted, scenes, strict=True):
        assert found.shape == image.shape[:2] and found.dtype == np.float32
        assert depth_metrics(found, depth).delta1 > 0.4
    whole = model.predict(scenes[0][0], whole=True)[0]
    assert whole.shape == predicted[0].shape and (whole != predicted[0]).any()


def test_the_report_starts_with_the_largest_errors(trained):
    report = (trained[0] / "report.html").read_text()
    start, end = report.index("Test images, the highest RMSE first"), report.index("<h2>Curves")
    shown = [float(error) for error in re.findall(r"RMSE ([\d.]+) m", report[start:end])]
    assert len(shown) == 8 and shown == sorted(shown, reverse=True)
    assert np.mean(shown) == pytest.approx(trained[1]["rmse"], abs=1e-3)


def test_predict_writes_millimetres_colours_and_a_page(trained, model, run, tmp_path):
    image, _ = scene(2000)
    (tmp_path / "photos").mkdir()
    Image.fromarray(image).save(tmp_path / "photos" / "a.png")
    out = tmp_path / "out"
    flags = (f"--checkpoint={trained[0]}", f"--out={out}", str(tmp_path / "photos"))
    result = run(*flags, module="vit_jax.predict")
    assert result.returncode == 0, result.stderr
    assert "millimetres (config.data.depth_scale=0.001)" in result.stderr
    assert " m, median " in result.stdout
    written = np.asarray(Image.open(out / "depth" / "a.png"))
    assert written.dtype == np.uint16
    np.testing.assert_allclose(written / 1000, model.predict(image)[0], atol=1e-3)
    assert Image.open(out / "colours" / "a.jpg").size == image.shape[1::-1]
    assert "a.png" in (out / "index.html").read_text()


@pytest.mark.slow
def test_the_server_answers_with_predicts_depths(trained, model, run, tmp_path):
    image, _ = scene(2000)
    encoded = io.BytesIO()
    Image.fromarray(image).save(encoded, "PNG")
    server = Server(run, tmp_path, trained[0], "--port=0", "--batch_size=2")
    with contextlib.closing(server):
        answer = server.predict(encoded.getvalue(), "?overlay=1&seen=1")
        _, _, about = server.ask("/health")
        _, _, page = server.ask("/")
    (expected,) = model.predict(image)
    served = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["depth"]))))
    np.testing.assert_allclose(served * answer["unit"], expected, atol=1e-3)
    found = [answer["metres"][place] for place in ("nearest", "median", "farthest")]
    np.testing.assert_allclose(found, np.quantile(expected, (0, 0.5, 1)), rtol=1e-4)
    colours, seen = (
        Image.open(io.BytesIO(base64.b64decode(answer[name].partition(",")[2])))
        for name in ("overlay", "seen")
    )
    assert colours.size == seen.size
    lightness = np.asarray(colours.convert("L").resize(expected.shape[::-1]), float)
    assert np.corrcoef(lightness.ravel(), expected.ravel())[0, 1] < -0.7  # Near pixels are light.
    assert json.loads(about)["task"] == "depth" and "The depth of each pixel" in page


def test_the_suite_measures_predicted_depths_and_shows_the_worst_first(trained, model, tmp_path):
    options = {"set": parse_sets([str(trained[0].parent / "scenes")])}
    lines = []
    results = run_suites(trained[0], ["depth"], tmp_path / "out", options=options, log=lines.append)
    rows = {name: row for (_, name), row in results.rows.items()}
    scenes = [scene(1000 + index) for index in range(8)]
    predicted = model.predict([image for image, _ in scenes])
    each = [
        depth_metrics(found, np.round(depth / UNIT) * UNIT)
        for found, (_, depth) in zip(predicted, scenes, strict=True)
    ]
    for name, value in zip(("RMSE", "AbsRel", "log10", "delta1"), np.mean(each, 0), strict=False):
        assert rows[f"scenes, {name}"].accuracy == pytest.approx(value, rel=1e-4), name
    text = results.markdown()
    assert "depth maps in units of 0.00390625 m" in text
    assert f"| {rows['scenes, RMSE'].accuracy:.3f} m | 8 |" in text
    assert f"| {rows['scenes, delta1'].accuracy:.2%}".replace("%", " %") in text
    assert any(line.startswith("scenes, RMSE: ") and line.endswith(" m") for line in lines)
    page = (tmp_path / "out" / "depth_scenes.html").read_text()
    shown = [float(rmse) for rmse in re.findall(r"RMSE ([\d.]+) m", page)]
    np.testing.assert_allclose(shown, sorted((x.rmse for x in each), reverse=True), atol=1e-3)
    part = {"depth_part": "nyu"}
    lacking = run_suites(trained[0], ["depth"], tmp_path / "nyu", options=options | part, log=str)
    assert "depth_part=nyu is for images of 640x480 pixels" in lacking.markdown()


def test_other_runs_have_no_depth_head(trained, tmp_path):
    with pytest.raises(UserError, match="has no segmentation head"):
        vit_jax.load_segmenter(trained[0], log=str)
    vit_jax.save_model(vit_jax.create_model("ViT-Ti/16", num_classes=2), tmp_path / "model")
    with pytest.raises(UserError, match="has no depth head: give the workdir of a run"):
        vit_jax.load_depth(tmp_path / "model", log=str)


def test_a_run_that_continues_a_head_starts_with_its_parameters(trained, tmp_path):
    config = config_of_scenes(trained[0].parent / "scenes")
    config.model.name, config.finetune.checkpoint = "", str(trained[0])
    config.model.update(dict.fromkeys(("dim", "depth", "mlp_dim", "heads")))
    config.steps, config.optimizer.warmup_steps, config.optimizer.learning_rate = 1, 0, 0.0
    again = vit_jax.train(config, tmp_path / "run")
    # Only the running statistics of batch norm have changed a little.
    assert again["rmse"] == pytest.approx(trained[1]["rmse"], rel=0.05)
