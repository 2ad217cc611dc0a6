"""Limits of the server, tested without a network: host names, waiting images, pixels and JSON."""

import asyncio
import io
import json
import types

import pytest
from PIL import Image

from vit_jax.serving import batching, service
from vit_jax.serving.batching import Batcher, Busy
from vit_jax.serving.engine import ClassifierEngine
from vit_jax.serving.hosts import is_ours
from vit_jax.serving.metrics import Metrics
from vit_jax.serving.service import Limits, Service

ENGINE = types.SimpleNamespace(sizes=[1, 4], names=None, parameters=ClassifierEngine.parameters)
JSON = "application/json"


def ask(path="/", body=b"", host="localhost", kind="", query=b"", most=4, taken=0, **options):
    """Returns status, headers and text of a response.

    The server accepts up to a million pixels per request.

    Args:
      most: the largest number of images that wait or are being computed.
      taken: the number of such images of other requests.
    """
    limits = Limits(upload=10**8, pixels=10**6, seconds=100)
    served = Service(
        ENGINE, None, Metrics([1, 4]), limits, {}, "<p>The page", most, threads=1, **options
    )
    headers = [(b"host", host.encode()), (b"content-type", kind.encode())]
    scope = {"type": "http", "method": "POST" if body else "GET", "path": path, "headers": headers}
    scope |= {
        "http_version": "1.1",
        "scheme": "http",
        "query_string": query,
        "raw_path": path.encode(),
    }
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    async def answered():
        async with served._batcher.places(taken, 0):
            await served.app()(scope, receive, send)

    asyncio.run(answered())
    start, *rest = sent
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], found, b"".join(message["body"] for message in rest).decode()


@pytest.mark.parametrize(
    ("host", "right"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("a.localhost", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("192.168.1.7", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("evil.example.", False),
        ("", False),
    ],
)
def test_host_names_of_other_domains_are_rejected(host, right):
    assert is_ours(host) is right
    assert is_ours(host, ["*"]) and is_ours("Evil.example:80", ["evil.example"])


def test_requests_to_another_name_are_refused_and_all_answers_have_the_headers():
    status, headers, text = ask(host="evil.example")
    assert (
        status == 421 and "'evil.example'" in json.loads(text)["error"] and "--hosts=NAME" in text
    )
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    status, headers, text = ask(host="evil.example", hosts=["evil.example"])
    assert (status, text) == (200, "<p>The page")
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    assert ask(path="/nowhere")[1]["x-content-type-options"] == "nosniff"


def picture(width, height):
    held = io.BytesIO()
    Image.new("L", (width, height)).save(held, "PNG")
    return held.getvalue()


def test_pixels_are_counted_of_all_images_of_a_request():
    images = [service.base64.b64encode(picture(1000, 600)).decode()] * 2
    status, _, text = ask("/predict", json.dumps({"images": images}).encode(), kind=JSON)
    assert status == 413 and "these 2 images have 1.2 million together; send fewer at once" in text
    status, _, text = ask("/predict", picture(1001, 1000))
    assert status == 413 and "this image has 1001x1000" in text


@pytest.mark.parametrize("value", ["0", "[]", "{}", '""', '"a":0'])
def test_json_of_many_values_is_not_parsed(monkeypatch, value):
    def parsed(text):
        raise AssertionError

    monkeypatch.setattr(service.json, "loads", parsed)
    status, _, text = ask(
        "/predict", b'{"images": [' + b",".join([value.encode()] * 100_000), kind=JSON
    )
    assert status == 400 and "the JSON must be" in text


def test_slashes_of_base64_may_be_escaped():
    body = json.dumps({"images": ["ab//" * 100_000]}).replace("/", "\\/").encode()
    status, _, text = ask("/predict", body, kind=JSON)
    # This error shows that the JSON was parsed.
    assert status == 422 and "not a readable image" in text


def test_request_that_waits_too_long_is_told_to_retry(monkeypatch):
    monkeypatch.setattr(batching, "PATIENCE", 0)
    status, headers, _ = ask("/predict", picture(8, 8), taken=4)
    assert (status, headers["retry-after"]) == (503, "1")


def test_requests_wait_in_the_order_of_arrival():
    async def taken(batcher, name, images, pixels, order):
        async with batcher.places(images, pixels):
            order.append(name)

    async def all_of_them():
        batcher, order = Batcher(ENGINE, 4, 100, Metrics([1])), []
        async with batcher.places(1, 80):
            each = [("large", 1, 30), ("all", 4, 0), ("small", 1, 1)]
            tasks = [asyncio.create_task(taken(batcher, *one, order)) for one in each]
            await asyncio.sleep(0)
            assert order == []
        await asyncio.gather(*tasks)
        return order, batcher.waiting

    assert asyncio.run(all_of_them()) == (["large", "all", "small"], 0)


@pytest.mark.parametrize(("images", "pixels"), [(4, 0), (1, 100)])
def test_images_and_pixels_that_wait_are_bounded(monkeypatch, images, pixels):
    monkeypatch.setattr(batching, "PATIENCE", 0)

    async def second():
        batcher = Batcher(ENGINE, 4, 100, Metrics([1]))
        async with batcher.places(images, pixels), batcher.places(1, 1):
            pass

    with pytest.raises(Busy):
        asyncio.run(second())
