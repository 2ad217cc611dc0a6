"""Servers on this machine that speak the protocols of Google Cloud Storage and of S3."""

import contextlib
import functools
from collections.abc import Iterator

import pytest

from tests.gcs_server import FakeStorage

KINDS = ("gs", "s3")


@contextlib.contextmanager
def serving(kind: str) -> Iterator[dict[str, str]]:
    """The variables by which a process, this one too, finds a server that has the bucket `pods`."""
    with pytest.MonkeyPatch.context() as patch:
        variables = variables_of_server(kind)
        for name, value in variables.items():
            patch.setenv(name, value)
        if kind == "s3":
            import boto3

            boto3.client("s3").create_bucket(Bucket="pods")  # Where it is there already, too.
        yield variables


@functools.cache
def variables_of_server(kind: str) -> dict[str, str]:
    """The variables by which a process finds the one server of this kind that this process has.

    One, since fsspec and etils keep a process's clients: they would go on asking the server that was first.
    """
    if kind == "gs":
        pytest.importorskip("gcsfs", reason='pip install -e ".[cloud]"')
        pytest.importorskip("google.cloud.storage")
        endpoint = FakeStorage("pods").endpoint
        return {
            "STORAGE_EMULATOR_HOST": endpoint,
            "TENSORSTORE_GCS_HTTP_URL": endpoint,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # Asks Google itself.
        }
    pytest.importorskip("s3fs", reason='pip install -e ".[cloud]"')
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    return {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "ada",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
