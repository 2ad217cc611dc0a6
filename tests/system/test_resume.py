"""A run that is killed and started again ends with the same results as an undisturbed run."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.system.conftest import SMALL, parameters
from vit_jax.runs.goodput import read_rows
from vit_jax.runs.workdir import workdir_at

pytestmark = pytest.mark.slow  # Each test starts processes, or compiles for seconds.


def figures(workdir: Path | str) -> list[dict]:
    """Returns the rows of metrics.jsonl without measured times."""
    rows = [
        json.loads(line)
        for line in (workdir_at(workdir) / "metrics.jsonl").read_text().splitlines()
    ]
    timed = ("train/images_per_second", "time/", "goodput")
    timeless = [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]
    # The row of a stopped run contains only its goodput.
    return [row for row in timeless if [*row] != ["step"]]


def assert_same(workdir: Path | str, expected: Path) -> None:
    """Asserts that parameters and metrics are bit-identical."""
    for one, other in zip(parameters(workdir), parameters(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    assert figures(workdir) == figures(expected)


def writing_checkpoint(workdir: Path, step: int) -> bool:
    """Returns True while a checkpoint is written: until then, Orbax uses a folder with another
    name.
    """
    folder = workdir / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []
    return any(name.startswith(str(step)) and name != str(step) for name in names)


MOMENTS = {
    "before the first step": lambda workdir: (workdir / "config.json").exists(),
    "in the write of the first checkpoint": lambda workdir: writing_checkpoint(workdir, 10),
    "in the write of a later checkpoint": lambda workdir: writing_checkpoint(workdir, 30),
    "between checkpoints": lambda workdir: (
        (workdir / "metrics.jsonl").exists()
        and len((workdir / "metrics.jsonl").read_text().splitlines()) >= 4
    ),
}


FIRST, *OTHERS = MOMENTS


@pytest.mark.parametrize(
    "moment", [FIRST, *(pytest.param(moment, marks=pytest.mark.slow) for moment in OTHERS)]
)
def test_killed_run_ends_with_the_same_bits(run, finished, tmp_path, moment):
    workdir = tmp_path / "run"
    run.killed(*SMALL, workdir=workdir, when=lambda: MOMENTS[moment](workdir))

    result = run(*SMALL, f"--workdir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    assert_same(tmp_path / "run", finished)


SCATTERED = "--config=configs/composed.py:model={},collection=digits,images=1000,steps=20,size=16"
OTHER_FAMILIES = {
    "ConvNeXt-T": ("blocks=(1, 1)", "widths=(16, 32)", "stochastic_depth=0.2"),
    "Swin-T": ("dim=16", "blocks=(2, 2)", "stage_heads=(2, 4)", "window=2", "stochastic_depth=0.2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", OTHER_FAMILIES)
def test_killed_run_of_another_family_ends_with_the_same_bits(run, tmp_path, model):
    flags = [
        SCATTERED.format(model),
        *(f"--config.model.{value}" for value in OTHER_FAMILIES[model]),
    ]
    flags += [
        f"--config.{value}"
        for value in ("batch_size=32", "checkpoint.every=5", "evaluate_every=10")
    ]
    flags += ["--config.data.test_split=test[:64]"]
    result = run(*flags, f"--workdir={tmp_path / 'whole'}")
    assert result.returncode == 0, result.stderr
    workdir = tmp_path / "run"
    run.killed(*flags, workdir=workdir, when=(workdir / "checkpoints" / "10").exists)
    result = run(*flags, f"--workdir={tmp_path / 'run'}")
    assert "continuing from" in result.stdout, result.stderr
    assert_same(tmp_path / "run", tmp_path / "whole")


# Self-distillation starts after step 4, so the run has a teacher before and after it was killed.
SIGLIP2 = (
    *("contrastive.captioning=1.0", "contrastive.patch_dropout=0.25", "contrastive.text_dim=16"),
    *("contrastive.self_distillation=0.5", "contrastive.self_distillation_from=0.2"),
    *("dino.global_crops=1", "dino.local_crops=1", "dino.local_size=8", "dino.prototypes=16"),
    *("dino.head_hidden=16", "dino.patch_weight=0.25", "dino.patch_prototypes=16"),
    *("batch_size=32", "checkpoint.every=5", "evaluate_every=10", "log_every=5"),
    "data.test_split=test[:64]",
)


@pytest.mark.slow
def test_killed_run_with_the_losses_of_siglip2_ends_with_the_same_bits(run, tmp_path):
    flags = [SCATTERED.format("ViT-32x1/8,captions=sigmoid")]
    flags += [f"--config.{value}" for value in SIGLIP2]
    result = run(*flags, f"--workdir={tmp_path / 'whole'}")
    assert result.returncode == 0, result.stderr
    workdir = tmp_path / "run"
    run.killed(*flags, workdir=workdir, when=(workdir / "checkpoints" / "10").exists)
    result = run(*flags, f"--workdir={workdir}")
    assert "continuing from" in result.stdout, result.stderr
    assert_same(workdir, tmp_path / "whole")


SEGMENTATION = (
    *("objective.name=segmentation", "data.test_crop=fit", "data.flip=True"),
    *("batch_size=16", "checkpoint.every=5", "evaluate_every=10", "log_every=5"),
    "data.test_split=test[:32]",
)
HEADS = {
    "linear": (),  # The head's batch norm has running statistics.
    "eomt": (
        *("segmentation.head=eomt", "segmentation.queries=6", "segmentation.query_layers=1"),
        *("segmentation.points=64", "segmentation.masked_until=(0.2,)"),
        "segmentation.unmasked_from=(0.9,)",
    ),
}


DETECTION = (
    *("objective.name=detection", "detection.dim=16", "detection.depth=1", "detection.queries=12"),
    *(
        "detection.most=8",
        "detection.masks=True",
        "detection.points=64",
        "model.pooling=gap",
        "model.attention=windows",
        "model.window=4",
    ),
    "model.global_layers=0",
)
HEADS["detection"] = DETECTION
# The composed source has no depth maps. The synthetic source has random ones.
HEADS["depth"] = (
    *("objective.name=depth", "data.source=synthetic", "data.path=", "data.test_split=test"),
    *("depth.bins=16", "depth.scale_steps=5", "depth.gradient_weight=0.5"),
)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_killed_run_of_a_dense_head_ends_with_the_same_bits(run, tmp_path, head):
    flags = [SCATTERED.format("ViT-32x1/4")]
    flags += [f"--config.{value}" for value in (*SEGMENTATION, *HEADS[head])]
    result = run(*flags, f"--workdir={tmp_path / 'whole'}")
    assert result.returncode == 0, result.stderr
    workdir = tmp_path / "run"
    run.killed(*flags, workdir=workdir, when=(workdir / "checkpoints" / "10").exists)
    result = run(*flags, f"--workdir={workdir}")
    assert "continuing from" in result.stdout, result.stderr
    assert_same(workdir, tmp_path / "whole")


@pytest.mark.slow
def test_sigterm_saves_prints_the_path_and_exits_with_zero(run, finished, tmp_path):
    process = run.start(*SMALL, "--config.checkpoint.every=1000", f"--workdir={tmp_path / 'run'}")
    for line in process.stdout:
        if line.startswith("first step"):
            process.send_signal(signal.SIGTERM)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (stopped,) = [line for line in out.splitlines() if line.startswith("stopped")]
    saved = Path(stopped.split("saved ")[1].split(";")[0])
    assert saved.is_dir()
    last = read_rows(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (
        last["step"] == int(saved.name) and last["time/save"] > 0
    )  # The goodput of the next start includes this time.

    result = run(*SMALL, "--config.checkpoint.every=1000", f"--workdir={tmp_path / 'run'}")
    assert "continuing from" in result.stdout
    for got, expected in zip(parameters(tmp_path / "run"), parameters(finished), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_signal_to_the_whole_group_leaves_the_decoding_processes_at_work(run, tmp_path, number):
    long = "--config.steps=4000", "--config.data.workers=2"
    process = run.start(*SMALL, *long, f"--workdir={tmp_path / 'run'}")
    for line in process.stdout:
        if line.startswith("first step"):
            os.killpg(process.pid, number)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert re.search("^stopped; saved", out, re.MULTILINE)
    assert "Traceback" not in err


@pytest.mark.slow
def test_sigterm_before_the_first_step_stops_all_processes(run, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "40")
    pair = run.start_pair(*SMALL, f"--workdir={tmp_path / 'run'}")
    try:
        for line in pair[0].stdout:
            if line.startswith("continuing from"):
                pair[1].send_signal(signal.SIGTERM)
                break
        (out, err), _ = [process.communicate(timeout=200) for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], err
    assert re.search("^stopped; saved .*/3[1-9];", out, re.MULTILINE), out


@pytest.mark.slow
def test_sigterm_in_an_evaluation_saves_and_the_evaluation_is_made_up_for(run, finished, tmp_path):
    workdir = f"--workdir={tmp_path / 'run'}"
    process = run.start(*SMALL, workdir, module="tests.system.disturbed", DISTURBANCE="terminate")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "test accuracy" not in out
    assert re.search("^stopped; saved .*/20;", out, re.MULTILINE)

    result = run(*SMALL, workdir)
    assert result.returncode == 0, result.stderr
    assert_same(tmp_path / "run", finished)


@pytest.mark.slow
def test_run_that_hangs_shows_its_threads_and_ends(run, tmp_path):
    process = run.start(
        *SMALL,
        "--config.evaluate_every=1000",
        "--config.checkpoint.every=1000",
        "--config.hang_seconds=4",
        f"--workdir={tmp_path / 'run'}",
        module="tests.system.disturbed",
        DISTURBANCE="hang",
    )
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert re.search(r"^no progress for \d+ s, since step \d+; .*/stacks-0.txt", out, re.MULTILINE)
    assert re.search(r"^error: no progress for \d+ s, since step \d+", err, re.MULTILINE)
    stacks = (tmp_path / "run" / "stacks-0.txt").read_text()
    assert "in hang" in stacks and "in take" in stacks


@pytest.mark.slow
def test_run_that_hangs_before_its_first_step_names_the_phase(run, tmp_path):
    process = run.start(
        *SMALL,
        "--config.hang_seconds=8",
        f"--workdir={tmp_path / 'run'}",
        module="tests.system.disturbed",
        DISTURBANCE="pipe",
    )
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1
    words = "since the start: reading the first batch"
    assert re.search(rf"^no progress for \d+ s, {words}; .*/stacks-0.txt", out, re.MULTILINE)
    assert re.search(rf"^error: no progress for \d+ s, {words}; see ", err, re.MULTILINE)
    assert "in pipe" in (tmp_path / "run" / "stacks-0.txt").read_text()


@pytest.mark.slow
def test_all_processes_skip_a_damaged_checkpoint(run, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints" / "40" / "params").rglob("*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)
    pair = run.start_pair(*SMALL, f"--workdir={tmp_path / 'run'}")
    try:
        (out, err), _ = [process.communicate(timeout=200) for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], err
    assert re.search("^checkpoint .*/40 is damaged: .*; moved to .*/damaged/40$", out, re.MULTILINE)
    assert re.search("^continuing from .*/30$", out, re.MULTILINE)
    for got, expected in zip(parameters(tmp_path / "run"), parameters(finished), strict=True):
        if got.shape[0] == 3 and got.ndim == 3:  # The biases of queries, keys and values.
            # The softmax is invariant to the keys' biases. Their gradients are rounding errors,
            # which Adam scales to full steps.
            got, expected = got[[0, 2]], expected[[0, 2]]
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_finished_run_started_again_only_reports(run, finished):
    before = figures(finished)
    result = run(*SMALL, f"--workdir={finished}")
    assert result.returncode == 0, result.stderr
    assert "first step" not in result.stdout
    assert figures(finished) == before
