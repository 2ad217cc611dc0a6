"""Local servers with the protocols of Google Cloud Storage and S3, for tests of buckets."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.gcs_server import FakeStorage

KINDS = ("gs", "s3")


@contextlib.contextmanager
def serving(kind: str) -> Iterator[dict[str, str]]:
    """Yields the environment variables that lead a process to a server with a bucket `pods`.

    The variables are also set in this process while the context is open.
    """
    with pytest.MonkeyPatch.context() as patch:
        variables = variables_of_server(kind)
        for name, value in variables.items():
            patch.setenv(name, value)
        if kind == "s3":
            import boto3

            # S3 accepts the request if the bucket already exists.
            boto3.client("s3").create_bucket(Bucket="pods")
        yield variables


@functools.cache
def variables_of_server(kind: str) -> dict[str, str]:
    """Returns the environment variables that lead a process to this process's server of a kind.

    There is only one server of each kind, because fsspec and etils cache their clients: they would
    continue to use the first server.
    """
    if kind == "gs":
        pytest.importorskip("gcsfs", reason='pip install -e ".[cloud]"')
        pytest.importorskip("google.cloud.storage")
        endpoint = FakeStorage("pods").endpoint
        return {
            "STORAGE_EMULATOR_HOST": endpoint,
            "TENSORSTORE_GCS_HTTP_URL": endpoint,
            # This check would send requests to Google.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
    pytest.importorskip("s3fs", reason='pip install -e ".[cloud]"')
    moto = pytest.importorskip("moto.moto_server.werkzeug_app")
    from werkzeug.serving import make_server  # werkzeug is a dependency of moto.

    application = moto.DomainDispatcherApplication(moto.create_backend_app)
    server = make_server(
        "127.0.0.1",
        0,
        one_at_a_time(application),
        threaded=True,
        request_handler=moto.MotoRequestHandler,
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "ada",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def one_at_a_time(application: Callable) -> Callable:
    """Returns the application with a lock, so that it answers one request at a time.

    If several clients create the same object at once, S3 lets only one of them succeed. moto tests
    whether the object exists and then stores it, so two concurrent requests would both succeed.
    """
    turn = threading.Lock()

    def answer(environment, start_response):
        with turn:
            return application(environment, start_response)

    return answer
