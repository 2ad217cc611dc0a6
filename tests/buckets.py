"""Servers on this machine that speak the protocols of Google Cloud Storage and of S3."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

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

    One, since fsspec and etils keep a process's clients: they would go on asking the server that
    was first.
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
    moto = pytest.importorskip("moto.moto_server.werkzeug_app")
    from werkzeug.serving import make_server  # Which moto brings.

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
    """The application, which begins with a request when it has done the one before.

    S3 makes an object of a name once, whoever asks at the same moment; moto looks whether it is
    there and then stores it, so that two requests at once both made it.
    """
    turn = threading.Lock()

    def answer(environment, start_response):
        with turn:
            return application(environment, start_response)

    return answer
