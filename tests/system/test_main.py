"""End-to-end tests of the training command."""

import gzip
import json
import re

import numpy as np
import pytest

import vit_jax
from tests.conftest import FAST_COMPILE, HANG
from tests.system.conftest import SMALL
from vit_jax.runs.goodput import KINDS


def losses(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def test_run_writes_the_files_of_the_readme(finished):
    names = {path.name for path in finished.iterdir()}
    assert {
        "config.json",
        "manifest.json",
        "checkpoints",
        "metrics.jsonl",
        "log.txt",
        "report.html",
    } <= names
    assert any(name.startswith("events.out.tfevents.") for name in names)


def test_log_has_the_summary_and_the_progress_and_the_report_the_parameters(finished):
    log, report = ((finished / name).read_text() for name in ("log.txt", "report.html"))
    assert "kernel" not in log and ", 16 pixels, float32, 3,498 parameters\n" in log
    assert "<td>patch_<wbr>embedding/<wbr>kernel<td>4 × 4 × 3 × 16<td>768</tr>" in report
    assert "devices  1 x cpu" in log
    assert "classes  0, 1, 2, 3, 4, 5, 6, 7, 8, 9\n" in log
    assert (
        log.index("classes ")
        < log.index("devices ")
        < log.index("compiling the step ...")
        < log.index("first step done")
    )
    assert re.search(
        r"step 40/40 \| epoch 0\.9 \| loss [\d.]+ \| accuracy [\d.]+% \| lr \S+ \| [\d,]+ images/s "
        r"\([\d,]+ a device\) \| .* left",
        log,
    )


def test_evaluation_covers_the_whole_split(finished):
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["test/images"] for row in rows if "test/images" in row] == [360, 360]


def test_model_can_be_loaded_from_the_workdir(finished):
    model = vit_jax.load_model(finished)
    assert model(np.zeros((1, 16, 16, 3), np.float32)).shape == (1, 10)


# The arrays are large enough to be sharded, and the programs compile fast.
WIDE = (
    *SMALL,
    *("--config.model.dim=64", "--config.model.mlp_dim=256", "--config.model.heads=2"),
    *("--config.log_every=1", "--config.steps=8", "--config.evaluate_every=8"),
)


@pytest.fixture(scope="module")
def one_device(run, tmp_path_factory) -> list[float]:
    """Returns the loss of each step on one device."""
    workdir = tmp_path_factory.mktemp("one") / "run"
    result = run(*WIDE, f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    assert len(losses(workdir)) == 8
    return losses(workdir)


@pytest.mark.slow
def test_two_processes_of_four_devices_give_the_losses_of_one_device(run, one_device, tmp_path):
    arguments = (*WIDE, "--config.mesh.fsdp=8", f"--workdir={tmp_path / 'run'}")
    four = {"XLA_FLAGS": f"{FAST_COMPILE} --xla_force_host_platform_device_count=4"}
    started = run.start_pair(*arguments, **four)
    try:
        outputs = [process.communicate(timeout=HANG) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert "8 x cpu" in (tmp_path / "run" / "log.txt").read_text()
    np.testing.assert_allclose(losses(tmp_path / "run"), one_device, rtol=1e-5)


@pytest.mark.slow
def test_one_device_continues_a_run_of_eight_devices_with_the_same_losses(
    run, one_device, tmp_path
):
    eight = {"XLA_FLAGS": f"{FAST_COMPILE} --xla_force_host_platform_device_count=8"}
    first = (*WIDE, "--config.checkpoint.every=5")
    checkpoints, mesh = (
        tmp_path / "run" / "checkpoints",
        ("--config.mesh.fsdp=2", "--config.mesh.tensor=2"),
    )
    run.killed(*first, *mesh, workdir=tmp_path / "run", when=(checkpoints / "5").exists, **eight)
    result = run(*first, f"--workdir={tmp_path / 'run'}")
    # If the process was not killed immediately, there is also a checkpoint of the last step.
    assert re.search(rf"continuing from {checkpoints}/[58]\b", result.stdout), result.stderr
    np.testing.assert_allclose(losses(tmp_path / "run"), one_device, rtol=1e-5)


@pytest.mark.slow
def test_micro_batches_train_and_their_steps_are_traced(run, tmp_path):
    arguments = (
        *SMALL,
        "--config.micro_batches=4",
        "--config.steps=8",
        "--config.profile=steps:3-4",
    )
    result = run(*arguments, f"--workdir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    assert f"trace of steps 3 to 4: xprof {tmp_path / 'run' / 'profile'}" in result.stdout
    (trace,) = (tmp_path / "run" / "profile").rglob("*.trace.json.gz")
    assert "jit_train_step" in gzip.decompress(trace.read_bytes()).decode()


def test_time_and_goodput_are_in_the_metrics(finished):
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    first, last = (row for row in (rows[0], rows[-2]))
    seconds = {key: value for key, value in last.items() if key.startswith("time/")}
    assert set(seconds) == {f"time/{kind}" for kind in KINDS}
    assert last["goodput"] == pytest.approx(seconds["time/train"] / sum(seconds.values()), abs=1e-3)
    assert (
        first["time/start"] == last["time/start"] > 0 and first["time/train"] < last["time/train"]
    )
    assert re.search(r"goodput [\d.]+% of \d+ s; ", (finished / "log.txt").read_text())


@pytest.mark.slow
def test_training_imports_no_tensorflow(run, tmp_path):
    result = run(
        *SMALL, "--config.steps=8", f"--workdir={tmp_path / 'run'}", PYTHONPROFILEIMPORTTIME="1"
    )
    assert result.returncode == 0
    assert "tensorboard" in result.stderr
    assert not re.search(r"\| +tensorflow$", result.stderr, re.MULTILINE)


def test_loss_that_is_not_finite_stops_the_run(run, tmp_path):
    result = run(
        *SMALL,
        "--config.optimizer.learning_rate=1e38",
        "--config.optimizer.warmup_steps=0",
        f"--workdir={tmp_path / 'run'}",
    )
    assert result.returncode == 2
    assert "not finite from step 2 on" in result.stderr
    assert "checkpoint" in result.stderr


def test_a_changed_model_has_the_same_name_in_all_outputs(finished):
    said = []
    vit_jax.load_model(finished, log=said.append)
    name = said[0].partition(" of a run")[0]
    assert name == "ViT-16x1 (MLP 32, 2 heads)/4"
    assert f"model    {name}, 16 pixels" in (finished / "log.txt").read_text()
    assert f"<title>{name} trained on digits" in (finished / "report.html").read_text()
