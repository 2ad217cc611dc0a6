"""HTTP handlers of the server."""

import asyncio
import base64
import contextlib
import io
import json
import string
import time
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vit_jax.data.decode import FORMATS, Unreadable
from vit_jax.errors import UserError
from vit_jax.inspection.page_images import heat_address
from vit_jax.serving.batching import Batcher, Busy
from vit_jax.serving.engine import Asked, ClassifierEngine, Engine
from vit_jax.serving.hosts import is_ours
from vit_jax.serving.metrics import Metrics
from vit_jax.serving.neighbours import Neighbours

MOST_NEIGHBOURS = 24
MOST_HELD = 1 << 29  # Maximum total size of current uploads, in bytes.
AGAIN = {"Retry-After": "1"}
MOST_SYNTAX = 10_000  # Maximum number of JSON characters outside of strings and numbers.
WORDS = (string.ascii_letters + string.digits + "+/=\\").encode()
# Headers of all responses. The other directives of the Content-Security-Policy are in the HTML of
# the page (`html_page.policy`).
HEADERS = (
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
)


class Limits(NamedTuple):
    """The limits of a request."""

    upload: int  # Size of the body, in bytes.
    pixels: int  # Total number of pixels in all images.
    seconds: float  # Maximum time from the first line of the request until the response.


class Refused(Exception):
    """Exception for a rejected request, with the HTTP status and the error message."""

    def __init__(self, status: int, words: str):
        self.status, self.words = status, words


class Service:
    """Handlers and state of one server.

    Args:
      about: description of the server for /health.
      most: maximum number of images that wait or are being computed.
      hosts: host names of the server, in addition to those that `is_ours` always allows.
    """

    def __init__(
        self,
        engine: Engine,
        neighbours: Neighbours | None,
        metrics: Metrics,
        limits: Limits,
        about: dict[str, Any],
        page: str,
        most: int,
        threads: int,
        hosts: Collection[str] = (),
    ):
        self._engine, self._neighbours, self._limits = engine, neighbours, limits
        self._metrics, self._about, self._page, self._hosts = metrics, about, page, hosts
        self._batcher = Batcher(engine, most, 4 * limits.pixels, metrics)
        self._decoders = ThreadPoolExecutor(threads, "decode")
        # An image with more pixels than `_large` is not decoded at the same time as another such
        # image. This limits the memory for decoded images.
        self._large = limits.pixels // threads
        self._one_large = asyncio.Lock()
        self._held = 0  # Total size of current uploads, in bytes.
        self._running: asyncio.Task | None = None

    def app(self) -> Starlette:
        """Returns the Starlette application."""
        return Starlette(
            routes=[
                Route("/", self.front),
                Route("/predict", self.predict, methods=["POST"]),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
            ],
            middleware=[Middleware(_Guard, hosts=self._hosts)],
            exception_handlers={HTTPException: _as_json},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._running = asyncio.create_task(self._batcher.run())
        yield
        self._running.cancel()

    async def front(self, request: Request) -> Response:
        """Returns the page."""
        return HTMLResponse(self._page)

    async def health(self, request: Request) -> Response:
        """Returns the model and the server's status; HTTP 503 if no task computes batches."""
        works = self._running is not None and not self._running.done()
        status, waiting = "ok" if works else "failed", self._batcher.waiting
        content = {"status": status, **self._about, "waiting": waiting}
        return JSONResponse(content, 200 if works else 503)

    async def metrics(self, request: Request) -> Response:
        """Returns the metrics in Prometheus' format."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def predict(self, request: Request) -> Response:
        """Handles `POST /predict`: returns the predictions for the images in the request."""
        started, status, headers = time.perf_counter(), 200, {}
        try:
            answer = await self._answer(request)
        except Refused as refusal:
            status, answer = refusal.status, {"error": refusal.words}
        except Busy:
            status, answer = 503, {"error": "all places are taken; retry in a second"}
        except ClientDisconnect:
            status, answer = 400, {"error": "the client is gone"}
        except Exception:
            self._metrics.requests.labels(500).inc()
            raise
        if status == 503:
            headers = AGAIN
        self._metrics.requests.labels(status).inc()
        self._metrics.seconds.observe(time.perf_counter() - started)
        return JSONResponse(answer, status, headers)

    async def _answer(self, request: Request) -> dict[str, Any]:
        body = bytearray()
        whole = False
        try:
            async with asyncio.timeout(self._limits.seconds):
                await self._read(request, body)
                whole = True
                asked, single, pixels = await self._in_thread(self._parse, request, bytes(body))
                async with self._batcher.places(len(pixels), sum(pixels)):
                    names = asked.names
                    classes = await self._embeddings(names) if names else None
                    sized = enumerate(zip(asked.images, pixels, strict=True), 1)
                    answers = [self._of_image(*x, number, asked, classes) for number, x in sized]
                    results = await asyncio.gather(*answers)
                return results[0] if single else {"results": results}
        except TimeoutError:
            seconds = f"{self._limits.seconds:g} s"
            if whole:
                raise Refused(503, f"there was no answer within {seconds}; retry later") from None
            raise Refused(408, f"the request did not come within {seconds} (--timeout)") from None
        finally:
            self._held -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        """Reads a request's body into `body`.

        Raises:
          Refused: the body is too large.
          Busy: the total size of current uploads is too large.
        """
        most = self._limits.upload
        too_large = Refused(413, f"an upload may have {most / 1e6:g} MB (--max_mb)")
        if int(request.headers.get("content-length", 0)) > most:
            raise too_large
        async for chunk in request.stream():
            body += chunk
            self._held += len(chunk)
            if len(body) > most:
                raise too_large
            if self._held > MOST_HELD:
                raise Busy
        if not body:
            words = "the request has no body; send an image: curl --data-binary @photo.jpg"
            raise Refused(400, words)

    def _parse(self, request: Request, body: bytes) -> tuple[Asked, bool, list[int]]:
        """Returns the result of `_parse_request`, and the number of pixels of each image."""
        asked, single = self._parse_request(request, body)
        return asked, single, self._pixels(asked.images)

    def _parse_request(self, request: Request, body: bytes) -> tuple[Asked, bool]:
        """Parses a request; also returns whether its body is an image (True) or JSON (False)."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "multipart/form-data":
            raise Refused(415, "send the image itself, not a form: curl --data-binary @photo.jpg")
        if kind != "application/json":
            return self._parse_parameters(_query(request), [body]), True
        try:
            # The number of syntax characters, such as brackets and commas, is limited. Otherwise a
            # request with millions of small values would take seconds to parse.
            if len(body.translate(None, WORDS)) > MOST_SYNTAX:
                raise ValueError
            parameters = json.loads(body)
            if not isinstance(parameters, dict) or not isinstance(parameters.get("images"), list):
                raise ValueError
            images = [base64.b64decode(image, validate=True) for image in parameters.pop("images")]
        except (ValueError, TypeError, RecursionError):
            raise Refused(400, 'the JSON must be {"images": [BASE64, ...]}') from None
        most = self._engine.sizes[-1]
        if not 1 <= len(images) <= most:
            words = f"a request may have 1 to {most} images, and this one has {len(images)}"
            raise Refused(400, words)
        return self._parse_parameters(parameters, images), False

    def _names(self, names: object) -> tuple[str, ...]:
        """Returns the class names of a request; raises Refused if they are invalid."""
        if self._engine.names is None:
            raise Refused(400, "there are no names: the server was started without --names=cat,dog")
        try:
            return self._engine.names.checked(names)
        except UserError as error:
            raise Refused(400, str(error)) from None

    def _parse_parameters(self, parameters: dict[str, Any], images: list[bytes]) -> Asked:
        supported, names = self._engine.parameters, ()
        if "names" in parameters and "names" in supported:
            names = self._names(parameters.pop("names"))
        for key, value in parameters.items():
            _check_parameter(key, value, supported)
        flags = {key: bool(parameters.get(key)) for key in ("heat", "seen", "overlay")}
        asked = Asked(images, neighbours=int(parameters.get("neighbours", 0)), names=names, **flags)
        if asked.heat and (reason := self._classifier_engine.no_heat) is not None:
            raise Refused(400, f"there is no heat map: {reason}")
        if asked.neighbours and self._neighbours is None:
            words = "there are no neighbours: the server was started without --neighbours=FOLDER"
            raise Refused(400, words)
        return asked

    async def _of_image(
        self, image: bytes, size: int, number: int, asked: Asked, classes: np.ndarray | None
    ) -> dict[str, Any]:
        """Predicts for one image of a request; returns the image's part of the JSON response.

        Args:
          size: number of pixels of the image.
          number: number of the image in the request, from 1.
          classes: embeddings of the class names in the request; None: the server's classes.
        """
        async with self._one_large if size > self._large else contextlib.nullcontext():
            decoded = await self._in_thread(self._decode, image, _where(number, asked.images))
        result = await self._batcher.compute(decoded, classes)
        answer = await self._in_thread(self._engine.answer, decoded, result, asked)
        if asked.looks:
            look = await self._batcher.on_device(self._classifier_engine.look, decoded)
            if asked.heat and look.heat is not None:
                answer["heat"] = {"weights": look.heat.tolist(), "picture": heat_address(look.heat)}
            if asked.neighbours and self._neighbours:
                nearest = self._neighbours.nearest, look.features, asked.neighbours
                answer["neighbours"] = await self._in_thread(*nearest)
        return answer

    @property
    def _classifier_engine(self) -> ClassifierEngine:
        """The engine as a `ClassifierEngine`, the only engine with `heat` and `neighbours`."""
        assert isinstance(self._engine, ClassifierEngine)
        return self._engine

    async def _embeddings(self, names: Sequence[str]) -> np.ndarray:
        """Returns the embeddings of class names, float32 `[names, dim]`."""
        assert self._engine.names is not None
        return await self._batcher.on_device(self._engine.names.embeddings, names)

    async def _in_thread(self, function, *arguments):
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoders, function, *arguments)

    def _pixels(self, images: list[bytes]) -> list[int]:
        """Returns the number of pixels of each image, read from its header.

        Raises:
          Refused: the bytes are not an image, or the images together have too many pixels.
        """
        most = self._limits.pixels
        allowed = f"{most / 1e6:g} million pixels are allowed (--max_megapixels)"
        pixels = []
        for number, image in enumerate(images, 1):
            where = _where(number, images)
            try:
                width, height = Image.open(io.BytesIO(image), formats=FORMATS).size
            except Image.DecompressionBombError:
                raise Refused(413, f"{where}{allowed}, and this image has far more") from None
            except Exception:  # Pillow's parsers may raise any exception for invalid bytes.
                kinds = ", ".join(FORMATS)
                raise Refused(422, f"{where}this is not a readable image ({kinds})") from None
            pixels.append(width * height)
            if pixels[-1] > most:
                raise Refused(413, f"{where}{allowed}, and this image has {width}x{height}")
        if sum(pixels) > most:
            have = f"these {len(images)} images have {sum(pixels) / 1e6:.3g} million together"
            raise Refused(413, f"{allowed} in a request, and {have}; send fewer at once")
        return pixels

    def _decode(self, image: bytes, where: str) -> Any:
        """Decodes an image to the engine's input; raises Refused if the image is damaged."""
        try:
            return self._engine.decode(image)
        except Unreadable as error:
            reason = " ".join(str(error).split())
            raise Refused(422, f"{where}the image is damaged or truncated: {reason}") from None


class _Guard:
    """Middleware that checks the Host header of requests, and adds `HEADERS` to each response."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        app = self._app
        if host and not is_ours(host, self._hosts):
            words = f"this server is not known as {host[:100]!r}; to allow the name: --hosts=NAME"
            app = JSONResponse({"error": words}, 421)
        await app(scope, receive, send_guarded)


def _check_parameter(key: str, value: object, supported: Sequence[str]) -> None:
    """Raises Refused if a numeric parameter of a request is unknown or out of range."""
    if key not in supported:
        known = ", ".join(supported)
        raise Refused(400, f"{key!r} is an unknown parameter; supported: {known}")
    if not isinstance(value, int):
        raise Refused(400, f"{key} must be a whole number")
    most = MOST_NEIGHBOURS if key == "neighbours" else 1
    if not 0 <= value <= most:
        raise Refused(400, f"{key} must be 0 to {most}")


def _query(request: Request) -> dict[str, Any]:
    """Returns the parameters in a request's URL; raises Refused if one occurs twice."""
    query: dict[str, Any] = {}
    for key, value in request.query_params.multi_items():
        if key in query:
            raise Refused(400, f"{key!r} is there twice: give it once, several names as cat,dog")
        query[key] = value.split(",") if key == "names" else _number(value)
    return query


def _where(number: int, images: list[bytes]) -> str:
    return f"image {number}: " if len(images) > 1 else ""


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else text


async def _as_json(request: Request, error: Exception) -> Response:
    """Converts an error, such as an unknown path or method, to a JSON response."""
    assert isinstance(error, HTTPException)
    words = f"{error.detail}; supported: POST /predict, GET /, /health and /metrics"
    return JSONResponse({"error": words}, error.status_code, error.headers)
