"""The training command, end to end."""

import json
import re

import numpy as np
import pytest

import vit_jax
from tests.system.conftest import SMALL


def losses(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def test_run_leaves_what_the_readme_names(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"config.json", "manifest.json", "checkpoints", "metrics.jsonl", "log.txt", "report.html"} <= names
    assert any(name.startswith("events.out.tfevents.") for name in names)


def test_log_has_the_table_the_summary_and_the_progress(finished):
    log = (finished / "log.txt").read_text()
    assert "patch_embedding/kernel" in log
    assert "devices  1 x cpu" in log
    assert re.search(
        r"step 35/40 \| epoch 0\.8 \| loss [\d.]+ \| accuracy [\d.]+% \| lr \S+ \| [\d,]+ images/s "
        r"\([\d,]+ a device\) \| .* left",
        log,
    )


def test_evaluation_covers_the_whole_split(finished):
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["test/images"] for row in rows if "test/images" in row] == [360, 360]


def test_model_loads_from_the_workdir_alone(finished):
    model = vit_jax.load_model(finished)
    assert model(np.zeros((1, 16, 16, 3), np.float32)).shape == (1, 10)


def test_eight_devices_give_the_losses_of_one(run, tmp_path):
    arguments = (*SMALL, "--config.log_every=1", "--config.steps=12")
    eight = "--xla_force_host_platform_device_count=8"
    assert run(*arguments, f"--workdir={tmp_path / 'one'}").returncode == 0
    assert run(*arguments, f"--workdir={tmp_path / 'eight'}", XLA_FLAGS=eight).returncode == 0
    assert "devices  8 x cpu" in (tmp_path / "eight" / "log.txt").read_text()
    one = losses(tmp_path / "one")
    assert len(one) == 12
    np.testing.assert_allclose(losses(tmp_path / "eight"), one, rtol=1e-5)


def test_two_processes_give_the_losses_of_one(run, tmp_path):
    import portpicker

    arguments = (*SMALL, "--config.log_every=1", "--config.steps=12")
    assert run(*arguments, f"--workdir={tmp_path / 'one'}").returncode == 0
    address = f"--coordinator=localhost:{portpicker.pick_unused_port()}"
    pair = [
        run.start(*arguments, f"--workdir={tmp_path / 'two'}", address, "--processes=2", f"--process={index}")
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], outputs
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5)


def test_micro_batches_train(run, tmp_path):
    result = run(*SMALL, "--config.micro_batches=4", "--config.steps=8", f"--workdir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr


def test_training_imports_no_tensorflow(run, tmp_path):
    result = run(*SMALL, "--config.steps=8", f"--workdir={tmp_path / 'run'}", PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 0
    assert "tensorboard" in result.stderr
    assert not re.search(r"\| +tensorflow$", result.stderr, re.MULTILINE)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_loss_that_is_not_finite_stops_the_run(run, tmp_path, value):
    result = run(
        *SMALL,
        "--config.optimizer.learning_rate=" + value,
        "--config.optimizer.warmup_steps=0",
        f"--workdir={tmp_path / 'run'}",
    )
    assert result.returncode == 2
    assert "not finite from step 2 on" in result.stderr
    assert "checkpoint" in result.stderr
