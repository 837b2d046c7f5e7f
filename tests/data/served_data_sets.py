"""A stand-in for the Hub on the loopback that serves folders as data sets, for processes that only read."""

import json
import threading
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


COMMIT = "0" * 40


class DataSets:
    """The server: `with DataSets({"owner/name": folder}) as served`."""

    def __init__(self, folders: dict[str, Path]):
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Request,), {"folders": folders}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "DataSets":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Request(BaseHTTPRequestHandler):
    folders: dict[str, Path]
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        body = unquote(self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode())
        path = unquote(self.path.partition("?")[0])
        parts = path.removeprefix("/api").removeprefix("/datasets/").split("/")
        folder = self.folders.get("/".join(parts[:2]))
        if folder is None:
            self.answer(404, b'{"error": "Repository not found"}', X_Error_Code="RepoNotFound")
            return
        what, below = parts[2:3], folder.joinpath(*parts[4:])
        if what == ["resolve"]:
            self._file(below)
        elif what == ["tree"]:
            found = below.rglob("*") if "recursive=true" in self.path.lower() else below.glob("*")
            if below.is_dir():
                self.answer(200, json.dumps([self._entry(folder, file) for file in sorted(found)]).encode())
            else:
                self.answer(404, b"[]", X_Error_Code="EntryNotFound")
        elif what == ["paths-info"]:
            found = [file for file in sorted(folder.rglob("*")) if file.relative_to(folder).as_posix() in body]
            self.answer(200, json.dumps([self._entry(folder, file) for file in found]).encode())
        else:
            names = [{"rfilename": file.relative_to(folder).as_posix()} for file in sorted(folder.rglob("*.*"))]
            info = {"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": names, "tags": []}
            self.answer(200, json.dumps(info).encode())

    do_HEAD = do_POST = do_GET

    def _file(self, file: Path) -> None:
        if not file.is_file():
            self.answer(404, b"", X_Error_Code="EntryNotFound")
            return
        content = file.read_bytes()
        commit = {"X_Repo_Commit": COMMIT, "ETag": f'"{sha1(content).hexdigest()}"', "Accept_Ranges": "bytes"}
        self.answer(200, content, **commit)

    @staticmethod
    def _entry(folder: Path, file: Path) -> dict[str, object]:
        path = file.relative_to(folder).as_posix()
        oid = sha1(path.encode()).hexdigest()
        if file.is_dir():
            return {"type": "directory", "path": path, "oid": oid}
        return {"type": "file", "path": path, "size": file.stat().st_size, "oid": oid}
