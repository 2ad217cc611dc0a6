"""From unlabelled images to a fine-tuned model, by the real commands."""

import base64
import json
import re

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.system.conftest import SMALL
from tests.system.test_resume import assert_same

pytestmark = pytest.mark.slow  # Each test starts processes, or compiles for seconds.

SMALL_MAE = (
    *SMALL,
    "--config.model.position=sincos2d",
    "--config.objective.name=mae",
    "--config.mae.mask_ratio=0.75",
    "--config.mae.decoder_dim=16",
    "--config.mae.decoder_depth=1",
    "--config.mae.decoder_heads=2",
)


@pytest.fixture(scope="module")
def pretrained(run, tmp_path_factory):
    """Returns workdir and output of an undisturbed masked autoencoder run."""
    workdir = tmp_path_factory.mktemp("pretrained") / "run"
    result = run(*SMALL_MAE, f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    return workdir, result.stdout


@pytest.mark.slow
def test_killed_pretraining_ends_with_the_same_bits(run, pretrained, tmp_path):
    workdir = tmp_path / "run"
    run.killed(*SMALL_MAE, workdir=workdir, when=(workdir / "checkpoints" / "20").exists)
    result = run(*SMALL_MAE, f"--workdir={workdir}")
    assert "continuing from" in result.stdout, result.stderr
    assert_same(workdir, pretrained[0])


def test_run_prints_the_objectives_parameters_and_final_loss(pretrained):
    _, printed = pretrained
    assert re.search("^trains   mae, [0-9,]+ parameters of its own$", printed, re.MULTILINE)
    assert re.search(r"^step 40 \| test loss [0-9.]+ \(360 images\)$", printed, re.MULTILINE)
    assert "accuracy" not in printed and "classes" not in printed


def test_reconstructions_of_every_evaluation_are_in_the_report(pretrained):
    workdir, _ = pretrained
    html = (workdir / "report.html").read_text()
    assert html.index("step 40") < html.index("step 20")
    for step in (20, 40):
        png = (workdir / "reconstructions" / f"{step}.png").read_bytes()
        assert base64.b64encode(png).decode() in html
    pixels = np.asarray(Image.open(workdir / "reconstructions" / "40.png"))
    assert pixels.shape == (
        3 * 68,
        6 * 68,
        3,
        # There are 3 rows of 6 images. Images of 16 pixels are enlarged to 64 and have a frame.
    )
    original, visible, predicted = np.split(pixels, 3)
    shares = [(original == other).all(-1).mean() for other in (visible, predicted)]
    assert all(0.25 <= share < 0.45 for share in shares), shares


@pytest.mark.slow
def test_pretraining_goes_on_from_a_run_with_its_decoder(run, pretrained, tmp_path):
    """The runs are compared by the loss of the same test images with the same masked patches."""
    workdir, printed = pretrained
    still = (
        "--config.steps=1",
        "--config.optimizer.warmup_steps=0",
        "--config.optimizer.learning_rate=1e-12",
    )
    go_on = *SMALL_MAE, *still, f"--config.finetune.checkpoint={workdir}", "--config.model.name="
    losses = {}
    for start in ("kept", "new"):
        result = run(
            *go_on, f"--config.finetune.objective={start}", f"--workdir={tmp_path / start}"
        )
        assert result.returncode == 0, result.stderr
        assert re.search(
            f"^from     {start}: mae's own parameters, [a-z0-9,]+$", result.stdout, re.MULTILINE
        )
        losses[start] = float(re.search(r"test loss ([0-9.]+)", result.stdout)[1])
    final = float(re.findall(r"test loss ([0-9.]+)", printed)[-1])
    assert losses["kept"] == pytest.approx(final, abs=1e-4)
    assert losses["new"] > final + 0.01


@pytest.mark.slow
def test_model_that_is_loaded_has_nothing_of_the_objective(pretrained):
    model = vit_jax.load_model(pretrained[0], log=str)
    assert model.num_classes == 0
    assert model(np.zeros((1, 16, 16, 3), np.float32)).shape == (1, 16)


@pytest.mark.slow
def test_fine_tuning_starts_from_it_without_another_step(run, pretrained, tmp_path):
    checkpoint = f"--config.finetune.checkpoint={pretrained[0]}"
    tuning = "--config.model.pooling=gap", "--config.optimizer.layer_decay=0.65", "--config.steps=6"
    model = SMALL_MAE[: len(SMALL) + 1]
    result = run(*model, *tuning, checkpoint, f"--workdir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    assert "head/kernel none -> [16, 10], zero" in result.stdout
    assert re.search(r"^from     dropped: cls$", result.stdout, re.MULTILINE)
    assert "step 6 | test accuracy" in result.stdout


def test_features_of_it_are_evaluated_as_any_others(run, pretrained, tmp_path):
    arguments = (
        "--suite=fewshot",
        "--set=digits:",
        "--shots=1",
        "--seeds=0",
        f"--out={tmp_path / 'out'}",
    )
    result = run(*arguments, f"--checkpoint={pretrained[0]}", module="vit_jax.evaluate")
    assert result.returncode == 0, result.stderr
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert (row["suite"], row["accuracy"] is None) == ("fewshot", False)


def photographs(folder, count: int) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        pixels = rng.integers(256, size=(20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


@pytest.mark.slow
def test_images_need_no_folders_of_classes(run, tmp_path):
    photographs(tmp_path / "data" / "train", 40)
    photographs(tmp_path / "data" / "test" / "deeper", 8)
    photographs(tmp_path / "data" / "train" / ".thumbnails", 40)
    data = "--config.data.source=folder", f"--config.data.path={tmp_path / 'data'}"
    few = (
        "--config.steps=2",
        "--config.optimizer.warmup_steps=1",
        "--config.objective.name=masked_patch",
    )
    result = run(*SMALL, *data, *few, f"--workdir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    assert "40 images to train, 8 to test\n" in result.stdout
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["num_classes"], manifest["class_names"]) == (0, [])
