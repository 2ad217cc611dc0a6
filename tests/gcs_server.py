"""A local fake of Google Cloud Storage: the parts of its JSON API that gcsfs, google-cloud-storage
and TensorStore use.
"""

import base64
import email
import hashlib
import http.server
import itertools
import json
import re
import threading
import time
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c


class Stored(NamedTuple):
    """An object's content and generation; each write to the storage increases the generation."""

    content: bytes
    generation: int
    updated: float


class FakeStorage:
    """A server with fixed buckets.

    Attributes:
      buckets: the objects of each bucket, by the bucket's name and the object's key.
      closed: if True, every request fails with 401, as without credentials.
    """

    def __init__(self, *buckets: str):
        self.buckets: dict[str, dict[str, Stored]] = {name: {} for name in buckets}
        self.closed = False
        self.lock, self.generations, self.uploads = threading.Lock(), itertools.count(1), {}
        self.server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"storage": self})
        )
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def write(
        self, bucket: str, key: str, content: bytes, if_generation: int | None = None
    ) -> Stored | None:
        """Stores and returns an object; returns None if its generation is not `if_generation`."""
        with self.lock:
            there = self.buckets[bucket].get(key)
            if if_generation is not None and if_generation != (there.generation if there else 0):
                return None
            self.buckets[bucket][key] = stored = Stored(
                content, next(self.generations), time.time()
            )
            return stored


class _Handler(http.server.BaseHTTPRequestHandler):
    storage: FakeStorage
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.respond("GET")

    def do_POST(self):
        self.respond("POST")

    def do_PUT(self):
        self.respond("PUT")

    def do_DELETE(self):
        self.respond("DELETE")

    def log_message(self, *_):
        pass

    def respond(self, method: str) -> None:
        body = self.body()
        if self.storage.closed:
            self.answer(
                401, self.error(401, "Anonymous caller does not have storage.objects access")
            )
            return
        url = urlsplit(self.path)
        if url.path.startswith("/batch/"):
            self.batch(body)
            return
        status, content, headers = self.handle_one(method, self.path, body)
        self.answer(status, content, headers)

    def handle_one(self, method: str, target: str, body: bytes) -> tuple[int, bytes | dict, dict]:
        """Returns status, content and headers of the response to a request."""
        url = urlsplit(target)
        query = {
            name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()
        }
        path = re.sub("^/(upload|download|resumable)", "", url.path)
        found = re.fullmatch(r"/storage/v1/b/([^/]+)(?:/(o|storageLayout)(?:/(.+))?)?/?", path)
        if not found:
            return 404, self.error(404, f"no such method: {method} {path}"), {}
        bucket, kind, key = found.groups()
        objects = self.storage.buckets.get(bucket)
        if objects is None:
            return 404, self.error(404, "The specified bucket does not exist."), {}
        if kind is None:
            return 200, {"kind": "storage#bucket", "name": bucket, "id": bucket}, {}
        if kind == "storageLayout":
            return 200, {"bucket": bucket, "hierarchicalNamespace": {"enabled": False}}, {}
        if method in ("POST", "PUT") and key is None:
            return self.upload(bucket, query, body)
        if key is None:
            return 200, self.list(bucket, objects, query), {}
        if "/rewriteTo/b/" in key:
            source, target = key.split("/rewriteTo/b/")
            other, target = target.split("/o/")
            stored = objects[unquote(source)]
            made = self.storage.write(other, unquote(target), stored.content)
            return 200, {"done": True, "resource": about(other, unquote(target), made)}, {}
        key = unquote(key)
        stored = objects.get(key)
        if stored is None:
            return 404, self.error(404, f"No such object: {bucket}/{key}"), {}
        if method == "DELETE":
            if int(query.get("ifGenerationMatch", stored.generation)) != stored.generation:
                return 412, self.error(412, "conditionNotMet"), {}
            objects.pop(key, None)
            return 204, b"", {}
        if query.get("alt") == "media":
            return self.media(stored, query)
        return 200, about(bucket, key, stored), {}

    def media(self, stored: Stored, query: dict) -> tuple[int, bytes | dict, dict]:
        headers = {"x-goog-generation": str(stored.generation), "ETag": f'"{stored.generation}"'}
        if query.get("ifGenerationNotMatch") == str(stored.generation):
            return 304, b"", headers
        if query.get("ifGenerationMatch", str(stored.generation)) != str(stored.generation):
            return 412, self.error(412, "conditionNotMet"), headers
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return 200, stored.content, headers
        size = len(stored.content)
        first = int(asked[1]) if asked[1] else size - int(asked[2])
        last = min(int(asked[2]), size - 1) if asked[1] and asked[2] else size - 1
        if first >= size:
            return 416, self.error(416, "requestedRangeNotSatisfiable"), headers
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        return 206, stored.content[first : last + 1], headers

    def upload(self, bucket: str, query: dict, body: bytes) -> tuple[int, bytes | dict, dict]:
        key, wanted = query.get("name"), query.get("ifGenerationMatch")
        # The request contains all or a part of an upload that an earlier request started.
        if "upload_id" in query:
            key, wanted, before = self.storage.uploads[query["upload_id"]]
            body = before + body
            self.storage.uploads[query["upload_id"]] = (key, wanted, body)
            if self.headers.get("Content-Range", "/0").endswith("/*"):
                return 308, b"", {"Range": f"bytes=0-{len(body) - 1}"}
        elif query["uploadType"] == "multipart":
            described, body = parts(self.headers["Content-Type"], body)
            key = json.loads(described)["name"]
        elif query["uploadType"] == "resumable":
            key = key or json.loads(body)["name"]
            name = str(next(self.storage.generations))
            self.storage.uploads[name] = (key, wanted, b"")
            place = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={name}"
            return 200, {}, {"Location": f"{self.storage.endpoint}{place}"}
        stored = self.storage.write(bucket, key, body, None if wanted is None else int(wanted))
        if stored is None:
            return (
                412,
                self.error(412, "At least one of the pre-conditions you specified did not hold."),
                {},
            )
        return 200, about(bucket, key, stored), {}

    def list(self, bucket: str, objects: dict[str, Stored], query: dict) -> dict:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, prefixes = [], set()
        for key, stored in sorted(objects.copy().items()):
            if not key.startswith(prefix) or key < query.get("startOffset", ""):
                continue
            if "endOffset" in query and key >= query["endOffset"]:
                continue
            if delimiter and delimiter in key[len(prefix) :]:
                prefixes.add(prefix + key[len(prefix) :].split(delimiter)[0] + delimiter)
            else:
                items.append(about(bucket, key, stored))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}

    def batch(self, body: bytes) -> None:
        """Answers a batch request, which contains several requests."""
        kind = self.headers["Content-Type"]
        message = email.message_from_bytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body)
        answers = []
        for number, part in enumerate(message.get_payload(), 1):
            method, target, _ = part.get_payload().split(None, 2)
            status, content, _ = self.handle_one(
                method, urlsplit(target)._replace(netloc="").geturl(), b""
            )
            content = json.dumps(content) if isinstance(content, dict) else ""
            name = part.get("Content-ID", f"<b+{number}>").strip("<>")
            answers.append(
                "--batch\r\n"
                "Content-Type: application/http\r\n"
                f"Content-ID: <response-{name}>\r\n"
                "\r\n"
                f"HTTP/1.1 {status} {'OK' if status < 400 else 'Error'}\r\n"
                "Content-Type: application/json\r\n"
                f"Content-Length: {len(content)}\r\n"
                "\r\n"
                f"{content}\r\n"
            )
        text = "".join(answers) + "--batch--\r\n"
        self.answer(200, text.encode(), {"Content-Type": "multipart/mixed; boundary=batch"})

    def error(self, code: int, message: str) -> dict:
        return {"error": {"code": code, "message": message, "errors": [{"message": message}]}}

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, status: int, content: bytes | dict, headers: dict | None = None) -> None:
        headers = {"Content-Type": "application/octet-stream"} | (headers or {})
        if isinstance(content, dict):
            content, headers["Content-Type"] = json.dumps(content).encode(), "application/json"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def parts(kind: str, body: bytes) -> list[bytes]:
    """Returns the contents of the parts of a multipart request with this Content-Type."""
    boundary = b"--" + re.search('boundary="?([^";]+)', kind)[1].encode()
    found = re.split(b"\r?\n?" + re.escape(boundary) + b"(?:--)?\r?\n?", body)
    return [re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in found if part.strip()]


def about(bucket: str, key: str, stored: Stored) -> dict:
    """Returns the metadata of an object, as in Google's JSON API."""
    when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.updated))
    checksum = google_crc32c.Checksum(stored.content).digest()
    return {
        "kind": "storage#object",
        "name": key,
        "bucket": bucket,
        "id": f"{bucket}/{key}/{stored.generation}",
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(len(stored.content)),
        "updated": when,
        "timeCreated": when,
        "etag": str(stored.generation),
        "md5Hash": base64.b64encode(hashlib.md5(stored.content).digest()).decode(),
        "crc32c": base64.b64encode(checksum).decode(),
    }
