"""A local fake of the Hugging Face Hub that stores uploaded files."""

import base64
import hashlib
import http.server
import json
import os
import re
import threading
from pathlib import Path

# Access tokens of the user ada, with their roles.
TOKENS = {"hf_writes": "write", "hf_reads": "read"}


class FakeHub:
    """A server with model repositories.

    Attributes:
      repositories: the files of each repository, by the repository's name and the file's path.
      private: names of repositories that are visible only with an access token.
      gated: names of repositories whose files nobody may download.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]] | None = None):
        self.repositories, self.private, self.gated = dict(repositories or {}), set(), set()
        # Large files, by their SHA-256. They are uploaded before the commit that refers to them.
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self})
        )
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Returns environment variables that lead huggingface_hub to this server, with an empty
        cache.
        """
        return {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGG"))
        } | {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            **({"HF_TOKEN": token} if token else {}),
        }

    def sha(self, name: str) -> str:
        """Returns the id of a repository's commit, which is a hash of its files."""
        files = sorted(self.repositories[name].items())
        return hashlib.sha1(
            b"".join(path.encode() + content for path, content in files)
        ).hexdigest()

    def commit(self, name: str, lines: list[dict]) -> None:
        files = self.repositories[name]
        for line in lines:
            kind, value = line["key"], line["value"]
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            elif kind == "deletedFile":
                del files[value["path"]]


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self):
        self.read()

    def do_GET(self):
        self.read()

    def read(self):
        hub, path = self.hub, self.path.split("?")[0]
        if path == "/api/whoami-v2":
            if (role := TOKENS.get(self.token)) is None:
                return self.answer({"error": "Invalid username or password."}, 401)
            return self.answer(
                {"name": "ada", "type": "user", "auth": {"accessToken": {"role": role}}}
            )
        found = re.fullmatch(
            r"/(?:api/models/)?([\w.-]+/[\w.-]+)(?:/(tree|resolve|revision)/(.*))?", path
        )
        name, what, rest = found.groups() if found else (path, None, None)
        if name not in hub.repositories or (name in hub.private and not self.token):
            return self.answer(
                {"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"}
            )
        files = hub.repositories[name]
        if what == "resolve" and name in hub.gated:
            said = {"error": f"Access to model {name} is restricted"}
            return self.answer(said, 403, {"X-Error-Code": "GatedRepo"})
        if what == "resolve":
            file = rest.split("/", 1)[1]
            if file not in files:
                return self.answer(
                    {"error": "no such file"}, 404, {"X-Error-Code": "EntryNotFound"}
                )
            return self.send(
                files[file], 200, {"ETag": f'"{hashlib.sha1(files[file]).hexdigest()}"'}, name
            )
        if what == "tree":
            return self.answer(
                [
                    dict(
                        type="file",
                        path=path,
                        size=len(content),
                        oid=hashlib.sha1(content).hexdigest(),
                    )
                    for path, content in files.items()
                ]
            )
        siblings = [dict(rfilename=file) for file in files]
        return self.answer(
            dict(
                id=name, sha=hub.sha(name), private=name in hub.private, siblings=siblings, tags=[]
            )
        )

    def do_PUT(self):
        content = self.body()
        self.hub.large[hashlib.sha256(content).hexdigest()] = content
        self.answer({})

    def do_POST(self):
        hub, body = self.hub, self.body()
        if self.path == "/api/validate-yaml":
            known = "license: no-such-licence" not in json.loads(body)["content"]
            said = {"errors": [] if known else [{"message": '"license" must be one of [...]'}]}
            return self.answer(said, 200 if known else 400)
        if TOKENS.get(self.token) != "write":
            return self.answer({"error": "no rights"}, 403)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if asked["organization"] != "ada":
                return self.answer({"error": f"no rights to create a model under {name}"}, 403)
            if name in hub.repositories:
                said = {
                    "error": "You already created this model repo",
                    "url": f"{hub.endpoint}/{name}",
                }
                return self.answer(said, 409)
            hub.repositories[name] = {".gitattributes": b""}
            hub.private |= (
                {name} if asked.get("visibility") == "private" or asked.get("private") else set()
            )
            return self.answer({"url": f"{hub.endpoint}/{name}"})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                one | {"actions": {"upload": {"href": f"{hub.endpoint}/large/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        name, what = re.match(
            r"/api/models/([\w.-]+/[\w.-]+)/(preupload|commit)/", self.path
        ).groups()
        if what == "preupload":
            modes = [
                dict(
                    path=one["path"],
                    uploadMode="lfs" if one["path"].endswith(".safetensors") else "regular",
                    shouldIgnore=False,
                )
                for one in json.loads(body)["files"]
            ]
            return self.answer({"files": modes})
        hub.commit(name, [json.loads(line) for line in body.splitlines()])
        sha = hub.sha(name)
        return self.answer(
            {"success": True, "commitOid": sha, "commitUrl": f"{hub.endpoint}/{name}/commit/{sha}"}
        )

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(self, said, status: int = 200, headers: dict[str, str] | None = None):
        self.send(json.dumps(said).encode(), status, headers or {})

    def send(self, content: bytes, status: int, headers: dict[str, str], name: str = ""):
        self.hub.requests.append(f"{self.command} {self.path}")
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if name:
            self.send_header("X-Repo-Commit", self.hub.sha(name))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass
