"""A hub on this machine, and a cache of it as huggingface_hub leaves it."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

from teimgr.models import hub

SHA = "0123456789abcdef0123456789abcdef01234567"
# What the hub keeps as LFS objects, whose SHA-256 is in its listing.
LARGE = (".safetensors", ".bin")


class Hub:
    """Serves `files` (name → bytes) as one model with one commit; `asked` lists the paths of downloads.

    Files are sent only once `open` is set, which it is at first; `hold_after` bytes of a body are sent before that. A
    connection whose name is in `cuts` is cut after so many bytes, once. `ranges` lists where each download began.
    With `refuses` every request is answered with that status.
    A name in `forged` is answered with other bytes than it should, so many times.
    """

    def __init__(self, model_id: str, files: dict[str, bytes], gated: bool = False, hold_after: int = 0) -> None:
        self.open = threading.Event()
        self.open.set()
        self.model_id = model_id
        self.files = files
        self.gated = gated
        self.hold_after = hold_after
        self.holding = threading.Event()
        self.cuts: dict[str, int] = {}
        self.forged: dict[str, int] = {}
        self.refuses: int | None = None
        self.revisions = {"main", SHA}
        self.asked: list[str] = []
        self.ranges: list[tuple[str, int]] = []
        self.tokens: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))  # how long its end takes

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = request.path.split("?")[0]
        self.tokens.add(request.headers.get("Authorization", ""))
        if self.refuses is not None:
            self._send(request, self.refuses, b"{}", body)
            return
        revision, _, name = path.partition("/resolve/")[2].partition("/")
        about = path.removeprefix(f"/api/models/{self.model_id}").split("/")
        if path.startswith(f"/api/models/{self.model_id}/") and about[2] not in self.revisions:
            self._send(request, 404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(f"/api/models/{self.model_id}/tree/"):
            self._send(request, 200, json.dumps(self._tree()).encode(), body)
        elif path.startswith(f"/api/models/{self.model_id}"):
            self._send(request, 200, json.dumps(self._info()).encode(), body)
        elif path.startswith(f"/{self.model_id}/resolve/") and name in self.files and revision in self.revisions:
            self._send_file(request, name, body)
        else:
            self._send(request, 404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

    def _info(self) -> dict[str, object]:
        siblings = [{"rfilename": name} for name in self.files]
        about = {"id": self.model_id, "modelId": self.model_id, "sha": SHA, "siblings": siblings, "tags": []}
        return about | {"gated": "manual" if self.gated else False}

    def _tree(self) -> list[dict[str, object]]:
        rows = []
        for name, content in self.files.items():
            row: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": git_oid(content)}
            if name.endswith(LARGE):
                sha256 = hashlib.sha256(content).hexdigest()
                row["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
            rows.append(row)
        return rows

    def _send_file(self, request: BaseHTTPRequestHandler, name: str, body: bool) -> None:
        if self.gated:
            self._send(request, 403, b"{}", body, {"X-Error-Code": "GatedRepo"})
            return
        content = self.files[name]
        headers = {"ETag": f'"{etag(name, content)}"', "X-Repo-Commit": SHA}
        start = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if body:
            self.asked.append(name)
            self.ranges.append((name, start))
            if self.forged.get(name, 0):
                self.forged[name] -= 1
                content = bytes(len(content))
        self._send(request, 206 if start else 200, content[start:], body, headers, name)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        content: bytes,
        body: bool,
        headers: dict[str, str] | None = None,
        name: str = "",
    ) -> None:
        request.send_response(status)
        for key, value in (headers or {}).items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if body and (cut := self.cuts.pop(name, None)) is not None:
            request.wfile.write(content[:cut])
            request.close_connection = True
        elif body and name:
            request.wfile.write(content[: self.hold_after])
            self.holding.set()
            self.open.wait(60)
            request.wfile.write(content[self.hold_after :])
        elif body:
            request.wfile.write(content)


def git_oid(content: bytes) -> str:
    """The name that git, and so the hub, gives a small file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def etag(name: str, content: bytes) -> str:
    """What the hub sends as a file's ETag, which is its blob's name in the cache."""
    return hashlib.sha256(content).hexdigest() if name.endswith(LARGE) else git_oid(content)


def lay_out(cache: Path, model_id: str, files: dict[str, bytes], commit: str = SHA, ref: str = "main") -> Path:
    """Add a commit of a model to the cache; the result is its snapshot."""
    folder = cache / hub.folder_name(model_id)
    snapshot = folder / "snapshots" / commit
    for name, content in files.items():
        blob, shown = folder / "blobs" / etag(name, content), snapshot / name
        for parent in (blob.parent, shown.parent):
            parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        shown.symlink_to(Path(*[".."] * (2 + name.count("/")), "blobs", blob.name))
    (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    return snapshot


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a model directory by name, of its subfolders too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
