"""`vit-jax finetune PHOTOS` fine-tunes on a folder; the result is not worse than a linear probe."""

import json

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import vit_jax
from tests.system.conftest import parameters

MODULE = "vit_jax.finetune_photos"
FEW = (
    "--config.data.workers=0",
    "--config.batch_size=32",
    "--config.steps=12",
    "--config.evaluate_every=3",
    "--config.checkpoint.every=3",
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Returns a folder with a folder of images for each digit."""
    root = tmp_path_factory.mktemp("photos") / "digits"
    images, labels = load_digits(return_X_y=True)
    for number, (image, label) in enumerate(zip(images[:400], labels[:400], strict=True)):
        (root / str(label)).mkdir(parents=True, exist_ok=True)
        pixels = (image.reshape(8, 8) * 255 / 16).astype(np.uint8)
        Image.fromarray(pixels).save(root / str(label) / f"{number:03}.png")
    return root


def rows(workdir) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tuned(run, finished, photos, tmp_path_factory):
    """Returns workdir, output and arguments of a finished run."""
    workdir = tmp_path_factory.mktemp("tuned") / "run"
    arguments = (photos, f"--from={finished}", f"--workdir={workdir}", *FEW)
    result = run(*arguments, module=MODULE)
    assert result.returncode == 0, result.stderr
    return workdir, result.stdout, arguments


@pytest.mark.parametrize("flag", [(), ("--group=none",)])
def test_groups_in_file_names_are_kept_together_unless_the_flag_is_none(run, tmp_path, flag):
    for number in range(36):
        group, view = divmod(number, 3)
        file = tmp_path / "pets" / "ab"[group % 2] / f"{group:02}_view{view}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (number, 0, 0)).save(file)
    # The run ends after the options are chosen, because its workdir contains other files.
    model = vit_jax.create_model("ViT-32x1/8", image_size=16, num_classes=0, mlp_dim=32)
    weights = vit_jax.save_model(model, tmp_path / "tiny.npz", log=str)
    arguments = tmp_path / "pets", f"--from={weights}", f"--workdir={tmp_path}", *FEW
    result = run(*arguments, *flag, module=MODULE)
    assert "contains files but no run" in result.stderr
    chosen = "names show 12 groups, each of which is in one split; without groups: --group=none"
    assert (chosen in result.stdout) == (not flag)


def test_every_choice_is_printed_with_its_flag(tuned):
    _, printed, _ = tuned
    for words in (
        "--config.data.source='folder'",
        "10 folders of classes",
        "--config.data.flip=False",
        "the classes are letters or digits",
        "linear probe: fitted on 280 training images",
    ):
        assert words in printed


def test_the_kept_checkpoint_is_the_best_on_the_dev_images_including_the_probe(tuned):
    workdir, printed, _ = tuned
    dev = {row["step"]: row["dev/accuracy"] for row in rows(workdir) if "dev/accuracy" in row}
    assert [*dev] == [*range(0, max(dev) + 1, 3)] and len(dev) > 2
    (last,) = [row for row in rows(workdir) if "test/accuracy" in row and row["step"] > 0]
    kept = json.loads(
        (workdir / "checkpoints" / str(last["step"]) / "metrics" / "metrics").read_text()
    )
    assert dev[kept["kept/step"]] == max(dev.values()) == kept["accuracy"]
    model = vit_jax.load_model(workdir)
    assert model.num_classes == 10
    (first,) = [row for row in rows(workdir) if "test/accuracy" in row and row["step"] == 0]
    # The linear probe, on features that were trained with digits.
    assert first["test/accuracy"] > 0.3


def test_a_run_that_has_ended_only_reports(run, tuned):
    workdir, _, arguments = tuned
    before, lines = parameters(workdir), len(rows(workdir))
    result = run(*arguments, module=MODULE)
    assert result.returncode == 0, result.stderr
    assert "compiling the step" not in result.stdout
    for old, new in zip(before, parameters(workdir), strict=True):
        np.testing.assert_array_equal(old, new)
    assert len(rows(workdir)) == lines


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(run, tuned, tmp_path):
    workdir, _, (photos, start, _, *few) = tuned
    again = tmp_path / "again"
    arguments = (photos, start, f"--workdir={again}", *few)
    sixth = again / "checkpoints" / "6"
    run.killed(*arguments, workdir=again, when=sixth.exists, module=MODULE)
    result = run(*arguments, module=MODULE)
    assert result.returncode == 0, result.stderr
    for one, other in zip(parameters(workdir), parameters(again), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_run_without_improvement_stops_early(run, finished, photos, tmp_path):
    options = ("--config.optimizer.learning_rate=0.3", "--config.early_stopping=2")
    workdir = tmp_path / "run"
    result = run(
        photos, f"--from={finished}", f"--workdir={workdir}", *FEW, *options, module=MODULE
    )
    assert result.returncode == 0, result.stderr
    assert "none was better in 2 evaluations" in result.stdout
    assert max(row["step"] for row in rows(workdir)) < 12


@pytest.mark.slow
def test_main_makes_the_same_run(run, tuned, finished, photos, tmp_path):
    workdir = tmp_path / "run"
    arguments = (f"--config.data.path={photos}", f"--config.finetune.checkpoint={finished}", *FEW)
    result = run("--config=configs/my_images.py", *arguments, f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    for one, other in zip(parameters(tuned[0]), parameters(workdir), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_report_compares_the_probe_with_the_kept_checkpoint(tuned):
    workdir, _, _ = tuned
    page = (workdir / "report.html").read_text()
    kept = next(row["kept/step"] for row in rows(workdir) if "kept/step" in row)
    assert "linear probe, test accuracy" in page
    assert f"step {kept}" in page and "the best on the dev images" in page
    assert "now at" not in page


def test_a_program_makes_the_same_run(tuned, finished, photos, tmp_path):
    values = {
        "data.workers": 0,
        "batch_size": 32,
        "steps": 12,
        "evaluate_every": 3,
        "checkpoint.every": 3,
    }
    done = vit_jax.finetune(photos, finished, tmp_path / "run", values=values)
    for one, other in zip(parameters(tuned[0]), parameters(done.workdir), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    (last,) = [row for row in rows(tuned[0]) if "kept/step" in row]
    assert done.figures["accuracy"] == pytest.approx(last["test/accuracy"], abs=0.02)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name the images"),
        (["a", "b"], "unexpected argument 'b'"),
        (["/nowhere"], "there is no /nowhere"),
    ],
)
def test_mistake_is_one_line(run, finished, arguments, message):
    result = run(*arguments, f"--from={finished}", module=MODULE)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_run_that_made_no_step_begins_with_other_values(run, finished, photos, tmp_path):
    workdir = tmp_path / "run"
    arguments = (photos, f"--from={finished}", f"--workdir={workdir}", *FEW)
    run.killed(*arguments, workdir=workdir, when=(workdir / "config.json").exists, module=MODULE)
    if not any(
        (workdir / "checkpoints").glob("[0-9]*")
    ):  # Otherwise, the run was not killed before its first checkpoint.
        other = ("--config.optimizer.learning_rate=1e-4", "--config.steps=3")
        result = run(*arguments, *other, module=MODULE)
        assert result.returncode == 0, result.stderr
        config = json.loads((workdir / "config.json").read_text())
        assert config["optimizer"]["learning_rate"] == 1e-4
        assert config["steps"] == 3
