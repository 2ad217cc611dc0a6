"""Tracking libraries receive each metric once, even if the run is killed and continued."""

import json
import struct
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.system.conftest import SMALL

TO = "--config.log.to=('tensorboard', 'wandb', 'mlflow')"


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> dict[str, str]:
    """Returns the libraries' environment variables: W&B writes local files, MLflow a local
    database.
    """
    database = tmp_path_factory.mktemp("mlflow") / "runs.db"
    return {
        "WANDB_MODE": "offline",
        "WANDB_PROJECT": "tried",
        "MLFLOW_TRACKING_URI": f"sqlite:///{database}",
    }


@pytest.fixture(scope="module")
def tracked(run, servers, tmp_path_factory) -> Path:
    """Returns the workdir of a run that was killed after step 30 and continued."""
    workdir = tmp_path_factory.mktemp("tracked") / "sum-of-parts"
    run.killed(*SMALL, TO, workdir=workdir, when=(workdir / "checkpoints" / "30").exists, **servers)
    result = run(*SMALL, TO, f"--workdir={workdir}", **servers)
    assert result.returncode == 0, result.stderr
    return workdir


def rows(workdir, name: str) -> list[tuple[int, float]]:
    """Returns pairs of step and value of a metric in `metrics.jsonl`."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line[name]) for line in lines if name in line]


def wandb_records(workdir):
    """Yields the records of a run's W&B files.

    The files have the log format of LevelDB, with blocks of 32 KiB.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    for file in sorted(workdir.glob("wandb/offline-run-*/*.wandb")):
        content, at, record = file.read_bytes(), 7, b""
        while at + 7 <= len(content):
            if (left := 2**15 - at % 2**15) < 7:
                at += left
                continue
            size, kind = struct.unpack_from("<HB", content, at + 4)
            record += content[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # A whole record, or the last part of one.
                yield Record.FromString(record)
                record = b""


def wandb_rows(workdir) -> list[dict]:
    return [
        {
            item.key or ".".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in wandb_records(workdir)
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.fixture(scope="module")
def in_mlflow(tracked, servers):
    """Returns MLflow's client, and the only run of the experiment."""
    import mlflow

    client = mlflow.MlflowClient(servers["MLFLOW_TRACKING_URI"])
    (found,) = client.search_runs([client.get_experiment_by_name("vit_jax").experiment_id])
    return client, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train/loss", "test/accuracy"])
def test_each_library_has_the_rows_of_a_killed_run(tracked, in_mlflow, name):
    client, found = in_mlflow
    expected = rows(tracked, name)
    events = EventAccumulator(str(tracked)).Reload()
    of_wandb = [(row["step"], row[name]) for row in wandb_rows(tracked) if name in row]
    of_mlflow = [
        (metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, name)
    ]
    assert of_mlflow == expected
    assert (
        sorted({*of_wandb}) == expected
    )  # W&B may lose rows when the process is killed. The continued run sends all rows again.
    assert [(e.step, e.value) for e in events.Scalars(name)] == [
        (step, pytest.approx(x)) for step, x in expected
    ]


@pytest.mark.slow
def test_mlflow_stores_a_row_once_if_it_was_sent_just_before_a_kill(servers, tmp_path, monkeypatch):
    import mlflow

    from vit_jax.runs.trackers.mlflow import Tracker
    from vit_jax.runs.trackers.tracker import RunFacts

    monkeypatch.setenv("MLFLOW_TRACKING_URI", servers["MLFLOW_TRACKING_URI"])
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "killed")
    facts = RunFacts(tmp_path, "killed", "a run", {}, {})
    killed = Tracker(facts, "", 0)
    killed.row(7, {"loss": 2.0})
    # The row was sent, but the process was killed before it could note that.
    killed.row(14, {"loss": 1.5})
    continued = Tracker(facts, killed.identity, 7)
    continued.row(14, {"loss": 1.5, "accuracy": 0.5})
    continued.row(21, {"loss": 1.0})
    history = mlflow.MlflowClient().get_metric_history
    assert [(x.step, x.value) for x in history(killed.identity, "loss")] == [
        (7, 2.0),
        (14, 1.5),
        (21, 1.0),
    ]
    assert [(x.step, x.value) for x in history(killed.identity, "accuracy")] == [(14, 0.5)]


@pytest.mark.slow
def test_a_continued_run_is_the_same_run_to_each_library(tracked):
    begun = [r.run for r in wandb_records(tracked) if r.WhichOneof("record_type") == "run"]
    assert len({*tracked.glob("wandb/offline-run-*")}) == 2
    identity = json.loads((tracked / "trackers" / "wandb.json").read_text())["identity"]
    assert {(run.run_id, run.project, run.display_name) for run in begun} == {
        (identity, "tried", "sum-of-parts")
    }


@pytest.mark.slow
def test_each_library_has_the_config(tracked, in_mlflow):
    assert in_mlflow[1].data.params["optimizer.learning_rate"] == "0.002"
    run = next(r.run for r in wandb_records(tracked) if r.WhichOneof("record_type") == "run")
    updates = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert updates["model"]["dim"] == 16
    tags = EventAccumulator(str(tracked)).Reload()
    assert b'"dim": 16' in tags.Tensors("config")[0].tensor_proto.string_val[0]
    session = tags.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"optimizer.learning_rate" in session


@pytest.mark.slow
def test_each_library_has_the_pictures_of_the_report(tracked, in_mlflow):
    client, found = in_mlflow
    events = EventAccumulator(str(tracked)).Reload()
    (image,) = events.Images("seen/rollout")
    assert image.step == 40
    assert image.encoded_image_string == (tracked / "seen" / "rollout.png").read_bytes()
    assert any(
        "rollout" in file.path for file in client.list_artifacts(found.info.run_id, "images")
    )
    (width,) = (
        row["seen/rollout.width"] for row in wandb_rows(tracked) if "seen/rollout.width" in row
    )
    assert width == image.width


@pytest.mark.slow
def test_an_error_of_a_library_ends_the_run_before_its_start(run, tmp_path):
    home = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_MODE": "online"}
    result = run(*SMALL, "--config.log.to=('wandb',)", f"--workdir={tmp_path / 'run'}", **home)
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert "wandb login" in line
    assert "WANDB_MODE=offline" in line
