"""Tests of workdirs in buckets: their files, and the lock that allows one run at a time."""

import io
import itertools
import json
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from PIL import Image

from tests.buckets import KINDS, serving
from tests.conftest import HANG
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.runs.bucket import Bucket, Upload, fetched, url_of
from vit_jax.runs.bucket_lock import BucketLock
from vit_jax.runs.checkpoints import Checkpoints
from vit_jax.runs.workdir_lock import this_process

COUNT = itertools.count()


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    with serving(request.param):
        yield request.param


@pytest.fixture
def url(kind) -> str:
    """Returns the URL of a new workdir."""
    return f"{kind}://pods/runs/{next(COUNT)}"


def lock(url, **options) -> BucketLock:
    return BucketLock(Bucket(url), **{"log": pytest.fail, "beat_seconds": 0.2} | options)


def lock_on_another_host(url, number=1, beat=0) -> None:
    """Writes the lock of a process on another host, or its next heartbeat."""
    holder = this_process()._replace(host="pod-7", boot="another")._asdict()
    content = holder | {"since": 0, "token": "its own", "beat": beat}
    Bucket(url).write(f".lock-{number}", json.dumps(content).encode())


def test_an_object_is_created_once(url):
    bucket = Bucket(url)
    made = []
    threads = [
        threading.Thread(target=lambda i=i: made.append(bucket.create("x", b"%d" % i)))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False] * 7 + [True]
    assert bucket.names() == ["x"] and bucket.top() == ["x"]
    bucket.remove("x")
    assert bucket.read("x") is None and bucket.top() == []


def test_second_run_on_the_workdir_is_refused(url):
    with (
        lock(url),
        pytest.raises(UserError, match=f"^{url} is in use by another run: process"),
        lock(url),
    ):
        pass


def test_released_lock_is_free_at_once(url):
    for _ in range(2):
        with lock(url):
            pass
    assert Bucket(url).names() == [".lock-2"]


def test_lock_of_a_host_without_heartbeats_is_taken_over(url):
    lock_on_another_host(url)
    said = []
    with lock(url, log=said.append, stale_seconds=0.5) as mine:
        mine.check()
    assert "in use by process" in said[0] and "pod-7" in said[0]
    assert said[1].startswith(f"note: taking over {url} from process")


def test_lock_of_a_host_with_heartbeats_is_not_taken_over(url):
    lock_on_another_host(url)
    said = []

    def log(line):  # The other process writes a heartbeat while this one waits.
        said.append(line)
        lock_on_another_host(url, beat=1)

    with pytest.raises(UserError, match="is in use by another run: process .* on pod-7"):
        lock(url, log=log, stale_seconds=HANG).__enter__()
    assert "in use by process" in said[0]


def test_run_that_was_taken_over_stops_and_copies_nothing(url):
    workdir = fetched(url)
    with lock(url) as mine:
        lock_on_another_host(url, number=2)
        (workdir / "log.txt").write_text("of the first\n")
        with pytest.raises(UserError, match=f"{url} was taken over by process .* on pod-7"):
            Upload(workdir, mine.check).flush()
    assert Bucket(url).read("log.txt") is None


def test_run_whose_workdir_is_deleted_stops(url):
    with lock(url) as mine:
        for name in Bucket(url).names():
            Bucket(url).remove(name)
        with pytest.raises(UserError, match=f"the workdir {url} was deleted"):
            mine.check()


def test_growing_files_are_copied_to_the_bucket_and_back(url):
    workdir = fetched(url)
    assert url_of(workdir) == url
    with Upload(workdir, check=lambda: None, seconds=0.1) as upload:
        (workdir / "seen").mkdir()
        (workdir / "seen" / "tokens.png").write_bytes(b"\x89PNG\r\n")
        with (workdir / "metrics.jsonl").open("a") as rows:
            for step in range(3):
                print(json.dumps({"step": step}), file=rows, flush=True)
                upload.flush()
                assert Bucket(url).read("metrics.jsonl").decode().count("\n") == step + 1
        (workdir / "report.html").write_text("done")
    assert sorted(Bucket(url).names()) == ["metrics.jsonl", "report.html", "seen/tokens.png"]
    for path in workdir.rglob("*.*"):
        path.unlink()
    assert (fetched(url + "/") / "seen" / "tokens.png").read_bytes() == b"\x89PNG\r\n"


@pytest.mark.slow
def test_damaged_checkpoint_is_moved_and_the_previous_one_is_restored(url):
    folder, items = epath.Path(url) / "checkpoints", {"params": {"kernel": jnp.arange(1000.0)}}
    with Checkpoints(folder, keep_last=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, items)
    bucket = Bucket(f"{url}/checkpoints")
    assert sorted({name.split("/")[0] for name in bucket.names()}) == ["2", "3"]
    bucket.remove("2/commit_success.txt")  # A killed write leaves a checkpoint without this file.
    with Checkpoints(folder, keep_last=2) as checkpoints:
        assert checkpoints.steps == [3]
        checkpoints.save(4, items)
    assert sorted({name.split("/")[0] for name in bucket.names()}) == ["3", "4"]
    name = next(name for name in bucket.names() if name.startswith("4/params/ocdbt.process_0/d/"))
    bucket.write(name, bytes(len(bucket.read(name))))
    said = []
    with Checkpoints(folder, keep_last=2, log=said.append) as checkpoints:
        step, restored = checkpoints.restore_newest(items)
        assert (step, checkpoints.steps) == (3, [3])
    np.testing.assert_array_equal(restored["params"]["kernel"], np.arange(1000.0))
    assert f"{url}/checkpoints/4 is damaged" in said[0] and said[0].endswith(
        f"{url}/checkpoints/damaged/4"
    )


def test_the_error_about_a_missing_bucket_is_one_line(kind):
    with pytest.raises(
        UserError, match=f"^there is no bucket {kind}://nowhere, or these credentials"
    ):
        fetched(f"{kind}://nowhere/run")
    with pytest.raises(UserError, match="is a whole bucket: give a folder in it"):
        fetched(f"{kind}://pods")


def test_records_are_read_from_googles_buckets_and_refused_in_others(tmp_path, monkeypatch):
    from array_record.python.array_record_module import ArrayRecordWriter
    from tensorflow_datasets.proto import tf_example_pb2

    from vit_jax.data.sources.array_record import array_records

    writer = ArrayRecordWriter(str(tmp_path / "x"), "group_size:1,uncompressed")
    for number in range(5):
        example = tf_example_pb2.Example()
        example.features.feature["image"].bytes_list.value.append(b"image %d" % number)
        writer.write(example.SerializeToString())
    writer.close()
    with serving("gs") as variables:
        monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", variables["STORAGE_EMULATOR_HOST"])
        Bucket("gs://pods/set").write("train-0.array_record", (tmp_path / "x").read_bytes())
        source = array_records("gs://pods/set/train-*", None, None)
        assert [source[number].image for number in range(5)] == [
            b"image %d" % number for number in range(5)
        ]
    with pytest.raises(UserError, match="s3://pods/x .*mount the bucket, or copy them"):
        array_records("s3://pods/x", None, None)


@pytest.mark.slow
def test_a_data_set_of_tfds_is_read_from_googles_buckets(tmp_path, monkeypatch):
    from tests.data.prepared import prepare

    prepare("cifar10:3.0.2", tmp_path, {"train": 3, "test": 2})
    with serving("gs") as variables:
        monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", variables["STORAGE_EMULATOR_HOST"])
        for file in (tmp_path / "cifar10/3.0.2").iterdir():
            Bucket("gs://pods/cifar10/3.0.2").write(file.name, file.read_bytes())
        source = open_source("tfds", "train+test", path="gs://pods/cifar10/3.0.2")
        shades = [
            np.asarray(Image.open(io.BytesIO(source[i].image)))[0, 0, 0] for i in range(len(source))
        ]
        assert sorted(shades) == [*range(5)]
        assert [source[i].labels[0] for i in range(5)] == shades
        with pytest.raises(UserError, match="no prepared data set in gs://pods/nothing"):
            open_source("tfds", "train", path="gs://pods/nothing")
