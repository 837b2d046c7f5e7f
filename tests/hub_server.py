"""A stand-in for the Hugging Face Hub on the loopback: what uploads need, and failures on demand."""

import base64
import json
import re
import threading
from collections.abc import Callable
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml


TOKEN = "hf_right"
USER = "me"
# Small, so that even a tiny model is sent in several parts.
PART = 20_000


class Hub:
    """The server: `with Hub() as hub`.

    Attributes:
        repos: for each repository its files by path, as they were committed.
        commits: summaries of all commits, oldest first.
        requests: `(method, path)` of all requests.
        received: everything that was sent, bodies in one.
        fail: called with each request before it is answered; may answer it itself and return True.
    """

    def __init__(self, fail: Callable[["Request"], bool] | None = None, lfs: bool = True):
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self.received = b""
        self.fail = fail
        self.lfs = lfs
        self._objects: dict[str, bytes] = {}
        self._parts: list[dict[int, bytes]] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Request,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def count(self, part: str) -> int:
        """Requests whose path has a part."""
        return sum(part in path for _, path in self.requests)

    def download(self, repo: str, folder: Path) -> Path:
        """Write a repository's files to a folder."""
        for path, content in self.repos[repo].items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return folder


class Request(BaseHTTPRequestHandler):
    """One request."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, body: Any = None, **headers: str) -> None:
        """Answer with JSON, or with bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _handle(self) -> None:
        hub = self.hub
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with hub._lock:
            hub.requests.append((self.command, self.path))
            hub.received += self.body
        if hub.fail is not None and hub.fail(self):
            return
        storage = self.path.startswith("/storage/")
        if not storage and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            # The real Hub does not repeat the token; somebody's proxy may.
            sent = self.headers.get("Authorization", "no token")
            self.answer(401, {"error": f"Invalid credentials: {sent}"})
            return
        for pattern, method in ROUTES.items():
            if match := re.fullmatch(pattern, f"{self.command} {self.path.partition('?')[0]}"):
                with hub._lock:
                    method(self, *match.groups())
                return
        self.answer(404, {"error": f"No such page: {self.command} {self.path}"})

    do_GET = do_POST = do_PUT = do_HEAD = _handle

    def _whoami(self) -> None:
        self.answer(200, {"type": "user", "name": USER, "orgs": []})

    def _create(self) -> None:
        wanted = json.loads(self.body)
        repo = f"{wanted.get('organization') or USER}/{wanted['name']}"
        known = repo in self.hub.repos
        self.hub.repos.setdefault(repo, {})
        self.answer(409 if known else 200, {"url": f"{self.hub.url}/{repo}", "name": repo})

    def _validate(self) -> None:
        match = re.match(r"---\n(.*?)\n---\n", json.loads(self.body)["content"], re.DOTALL)
        try:
            metadata = yaml.safe_load(match.group(1))
            for model in metadata.get("model-index", []):
                for result in model["results"]:
                    assert isinstance(model["name"], str) and isinstance(result["task"]["type"], str)
                    assert {"type", "name"} <= set(result["dataset"])
                    assert all({"type", "value"} <= set(metric) for metric in result["metrics"])
        except Exception as error:
            self.answer(400, {"errors": [{"message": repr(error)}], "warnings": []})
            return
        self.answer(200, {"errors": [], "warnings": []})

    def _info(self, repo: str) -> None:
        if repo in self.hub.repos:
            self.answer(200, {"id": repo, "sha": "0" * 40, "siblings": [], "tags": []})
        else:
            self._no_repo()

    def _no_repo(self) -> None:
        self.answer(404, {"error": "Repository not found"}, **{"X-Error-Code": "RepoNotFound"})

    def _preupload(self, repo: str) -> None:
        if repo not in self.hub.repos:
            self._no_repo()
            return
        files = []
        for file in json.loads(self.body)["files"]:
            content = self.hub.repos[repo].get(file["path"])
            lfs = self.hub.lfs and file["path"].endswith((".safetensors", ".bin", ".pt", ".pth", "tokenizer.json"))
            oid = None
            if content is not None:
                git = sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
                oid = sha256(content).hexdigest() if lfs else git
            mode = "lfs" if lfs else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": files})

    def _batch(self, repo: str) -> None:
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            entry = {"oid": oid, "size": size}
            if oid not in self.hub._objects:
                header, href = {}, f"{self.hub.url}/storage/{oid}"
                if size > PART:
                    # A batch may hold a file twice: each has an upload of its own.
                    self.hub._parts.append({})
                    href = f"{self.hub.url}/storage/parts/{len(self.hub._parts) - 1}"
                    parts = range(1, -(-size // PART) + 1)
                    header = {"chunk_size": str(PART), **{str(n): f"{href}/{n}" for n in parts}}
                verify = {"href": f"{self.hub.url}/api/verify"}
                entry["actions"] = {"upload": {"href": href, "header": header}, "verify": verify}
            objects.append(entry)
        self.answer(200, {"transfer": "multipart", "objects": objects})

    def _put(self, oid: str) -> None:
        self._store(oid, self.body)

    def _put_part(self, upload: str, number: str) -> None:
        self.hub._parts[int(upload)][int(number)] = self.body
        self.answer(200, ETag=f"part-{number}")

    def _complete(self, upload: str) -> None:
        parts = self.hub._parts[int(upload)]
        self._store(json.loads(self.body)["oid"], b"".join(parts[n] for n in sorted(parts)))

    def _store(self, oid: str, content: bytes) -> None:
        whole = sha256(content).hexdigest() == oid
        if whole:
            self.hub._objects[oid] = content
        self.answer(200 if whole else 400, None if whole else {"error": "The content has another hash."})

    def _verify(self) -> None:
        oid = json.loads(self.body)["oid"]
        self.answer(200 if oid in self.hub._objects else 404)

    def _commit(self, repo: str) -> None:
        if repo not in self.hub.repos:
            self._no_repo()
            return
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.hub.commits.append(value["summary"])
            elif entry["key"] == "file":
                self.hub.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.hub.repos[repo][value["path"]] = self.hub._objects[value["oid"]]
        self.answer(200, {"commitUrl": f"{self.hub.url}/{repo}/commit/{'0' * 40}", "commitOid": "0" * 40})


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES: dict[str, Callable[..., None]] = {
    r"GET /api/whoami-v2": Request._whoami,
    r"POST /api/repos/create": Request._create,
    r"POST /api/validate-yaml": Request._validate,
    rf"GET /api/models/{REPO}(?:/revision/.+)?": Request._info,
    rf"POST /api/models/{REPO}/preupload/.+": Request._preupload,
    rf"POST /{REPO}\.git/info/lfs/objects/batch": Request._batch,
    r"PUT /storage/(\w+)": Request._put,
    r"PUT /storage/parts/(\d+)/(\d+)": Request._put_part,
    r"POST /storage/parts/(\d+)": Request._complete,
    r"POST /api/verify": Request._verify,
    rf"POST /api/models/{REPO}/commit/.+": Request._commit,
}


# --- Failures -------------------------------------------------------------------------------------------------------


def failing(where: str, how: Callable[[Request], None], times: int | None = None) -> Callable[[Request], bool]:
    """Fail requests whose path matches `where`, the first `times` of them or all."""
    left = [times]

    def fail(request: Request) -> bool:
        if not re.search(where, request.path) or left[0] == 0:
            return False
        if left[0] is not None:
            left[0] -= 1
        how(request)
        return True

    return fail


def status(code: int, **headers: str) -> Callable[[Request], None]:
    """Answer with an HTTP status."""
    return lambda request: request.answer(code, {"error": "out of order"}, **headers)


def garbage(request: Request) -> None:
    """Answer what is no JSON."""
    request.answer(200, b"<html>Hello")


def hang_up(request: Request) -> None:
    """Close the connection without an answer."""
    request.close_connection = True
    request.connection.close()
