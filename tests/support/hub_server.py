"""A local server with the hub's API: models with revisions, files with ranges, gated models and faults."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LFS = (".safetensors", ".gguf", ".bin")
TOKEN = "hf_secretTokenOfTheTests"
_MODEL = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class HubModel:
    """A repository with one revision."""

    files: dict[str, bytes]
    license: str | None = "apache-2.0"
    is_gated: bool = False

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files)).encode(), usedforsecurity=False).hexdigest()


@dataclass
class HubServer:
    """The state of the server. Faults may be changed between requests."""

    models: dict[str, HubModel] = field(default_factory=dict)
    cut_at: int | None = None  # the connection breaks after N bytes of a file of weights
    stall_at: int | None = None  # nothing follows after N bytes of such a file
    corrupt: set[str] = field(default_factory=set)  # files with one wrong byte
    surplus: int = 0  # bytes that follow each file of weights
    ignores_ranges: bool = False
    requests: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # bytes by file
    url: str = ""
    storage_url: str = ""  # of another origin, to which files of weights are redirected
    resume: threading.Event = field(default_factory=threading.Event)

    def add(self, repository: str, directory: Path, **options: Any) -> HubModel:
        """Serve the files of a directory as a model."""
        files = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
        self.models[repository] = HubModel(files, **options)
        return self.models[repository]

    def downloads(self, suffix: str = "") -> list[tuple[str, Mapping[str, str]]]:
        """Return the files that were requested with GET, with the headers, at the last server of a redirect."""
        return [
            (path.rpartition("/")[2], headers)
            for method, path, headers in self.requests
            if method == "GET" and path.endswith(suffix) and ("/resolve/" in path) != path.endswith(LFS)
        ]


@contextmanager
def running_hub() -> Iterator[HubServer]:
    """Run the server until the block ends."""
    state = HubServer()
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(state)) for _ in range(2)]
    state.url, state.storage_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield state
    finally:
        state.resume.set()
        for server in servers:
            server.shutdown()
            server.server_close()


def _handler(state: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            state.requests.append((self.command, self.path, dict(self.headers)))
            path = self.path.partition("?")[0]
            if match := _MODEL.fullmatch(path):
                self._describe(match[1], match[2])
            elif match := _FILE.fullmatch(path):
                self._resolve(match[1], match[2], match[3])
            elif path.startswith("/storage/"):
                _, _, organization, name, file = path.split("/", 4)
                self._send_file(file, state.models[f"{organization}/{name}"].files[file])
            else:
                self._fail(404, "EntryNotFound")

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

        def _describe(self, repository: str, revision: str | None) -> None:
            model = state.models.get(repository)
            if model is None:
                self._fail(401, "RepoNotFound")
            elif revision not in (None, "main", model.commit):
                self._fail(404, "RevisionNotFound")
            else:
                siblings = [_sibling(path, data) for path, data in model.files.items()]
                card = {"license": model.license} if model.license else {}
                self._send_json({"id": repository, "sha": model.commit, "siblings": siblings, "cardData": card})

        def _resolve(self, repository: str, revision: str, file: str) -> None:
            model = state.models.get(repository)
            if model is None or file not in model.files:
                self._fail(404, "EntryNotFound")
            elif model.is_gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._fail(401, "GatedRepo")
            elif file.endswith(LFS):
                self.send_response(302)
                self.send_header("Location", f"{state.storage_url}/storage/{repository}/{file}")
                self._send_file_headers(model, file)
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self._send_file(file, model.files[file], model)

        def _send_file_headers(self, model: HubModel, file: str) -> None:
            entry = _sibling(file, model.files[file])
            self.send_header("X-Repo-Commit", model.commit)
            self.send_header("ETag", f'"{entry["blobId"]}"')
            if "lfs" in entry:
                self.send_header("X-Linked-Etag", f'"{entry["lfs"]["sha256"]}"')
                self.send_header("X-Linked-Size", str(entry["size"]))

        def _send_file(self, file: str, data: bytes, model: HubModel | None = None) -> None:
            total = len(data)
            if file in state.corrupt:
                data = data[:-1] + bytes([data[-1] ^ 1])
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if wanted and not state.ignores_ranges:
                first, last = int(wanted[1]), min(int(wanted[2] or total - 1), total - 1)
                data = data[first : last + 1]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{total}")
            else:
                self.send_response(200)
            is_weights = file.endswith(LFS)
            if is_weights and state.surplus:
                data += bytes(state.surplus)
            if model is not None:
                self._send_file_headers(model, file)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "HEAD":
                return
            stop = min([len(data), *(at for at in (state.cut_at, state.stall_at) if is_weights and at is not None)])
            try:
                self.wfile.write(data[:stop])
                self.wfile.flush()
            except OSError:
                stop = 0
            state.sent[file] = state.sent.get(file, 0) + stop
            if stop < len(data):
                if state.stall_at is not None:
                    state.resume.wait(60)
                self.close_connection = True

        def _send_json(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _fail(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


def _sibling(path: str, data: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": git}
    if path.endswith(LFS):
        sha256 = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 130}
        entry["blobId"] = hashlib.sha1(sha256.encode(), usedforsecurity=False).hexdigest()
    return entry
