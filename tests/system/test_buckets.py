"""Runs with a workdir in a bucket: the real command with local servers."""

import signal
import time

import pytest

import vit_jax
from tests.buckets import KINDS, serving
from tests.conftest import HANG
from tests.gcs_server import FakeStorage
from tests.system.conftest import SMALL
from tests.system.test_resume import assert_same
from vit_jax.runs.bucket import Bucket, fetched
from vit_jax.runs.bucket_lock import BucketLock

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=KINDS)
def pods(request):
    """Yields a bucket's URL, and the environment variables that lead a process to its server."""
    with serving(request.param) as variables:
        yield f"{request.param}://pods", variables


def test_killed_run_in_a_bucket_ends_as_one_in_a_folder(run, finished, pods, tmp_path):
    variables = pods[1]
    # On a busy machine a run may end before this process tests the condition again.
    for attempt in range(20):
        url = f"{pods[0]}/run{attempt}"
        process, bucket = run.start(*SMALL, f"--workdir={url}", **variables), Bucket(url)
        while process.poll() is None and bucket.read("checkpoints/10/commit_success.txt") is None:
            time.sleep(0.05)
        process.kill()
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            break

    result = run(*SMALL, f"--workdir={url}", **variables)
    assert result.returncode == 0, result.stderr
    assert f"taking over {url} from process {process.pid}" in result.stdout
    assert f"continuing from {url}/checkpoints/" in result.stdout
    assert f"report: {url}/report.html" in result.stdout
    assert_same(url, finished)

    # This process loads the model from the bucket only.
    lines = []
    vit_jax.load_model(f"{url}@40", log=lines.append)
    assert f"of a run ({url}@40)" in lines[0]
    assert b"accuracy" in bucket.read("report.html")
    bucket.remove("report.html")
    result = run(url, module="vit_jax.report", **variables)
    assert (result.returncode, result.stdout.split()) == (0, [f"{url}/report.html"]), result.stderr
    assert b"accuracy" in bucket.read("report.html")
    arguments = "--suite=knn", "--set=digits:", "--neighbours=20", f"--out={tmp_path}"
    result = run(f"--checkpoint={url}", *arguments, module="vit_jax.evaluate", **variables)
    assert result.returncode == 0, result.stderr
    heading = (tmp_path / "results.md").read_text().partition("\n")[0]
    assert heading.endswith(f"a run ({url}, step 40)")


def test_second_run_in_a_bucket_is_refused(run, pods):
    url, variables = f"{pods[0]}/taken", pods[1]
    with BucketLock(Bucket(url)):
        result = run(*SMALL, f"--workdir={url}", **variables)
    assert result.returncode == 2
    assert f"error: {url} is in use by another run: process" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("pods", ["gs"], indirect=True)
def test_stopped_run_in_a_bucket_goes_on_over_two_processes(run, finished, pods):
    url, variables = f"{pods[0]}/pair", pods[1]
    process = run.start(*SMALL, "--config.checkpoint.every=1000", f"--workdir={url}", **variables)
    for line in process.stdout:
        if line.startswith("first step"):
            process.send_signal(signal.SIGTERM)
            break
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err
    assert f"stopped; saved {url}/checkpoints/" in out

    pair = run.start_pair(*SMALL, "--config.checkpoint.every=1000", f"--workdir={url}", **variables)
    try:
        (out, err), _ = [process.communicate(timeout=HANG) for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], err
    assert f"continuing from {url}/checkpoints/" in out
    assert "step 40 | test accuracy" in (fetched(url) / "log.txt").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_bucket_that_may_not_be_used_is_one_line(run, kind):
    pytest.importorskip({"gs": "gcsfs", "s3": "s3fs"}[kind])
    if kind == "gs":
        storage = FakeStorage("pods")
        storage.closed = True
        variables = {
            "STORAGE_EMULATOR_HOST": storage.endpoint,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
    else:
        variables = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}
        variables |= {
            "AWS_ACCESS_KEY_ID": "",
            "AWS_SECRET_ACCESS_KEY": "",
            "AWS_CONFIG_FILE": "/nowhere",
        }
    result = run(*SMALL, f"--workdir={kind}://pods/run", **variables)
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert f"cannot use {kind}://pods/run" in line and "credentials" in line
    assert "Traceback" not in result.stderr
