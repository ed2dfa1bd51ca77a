"""A hub on loopback: enough of its HTTP interface for huggingface-hub to look a model up and download it."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves `files` (name → bytes) as one model; `asked` lists the paths of downloads.

    Files are sent only once `open` is set, which it is at first.
    """

    def __init__(self, model_id: str, files: dict[str, bytes], gated: bool = False) -> None:
        self.open = threading.Event()
        self.open.set()
        self.model_id = model_id
        self.files = files
        self.gated = gated
        self.asked: list[str] = []
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
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = request.path.split("?")[0]
        name = path.partition("/resolve/")[2].partition("/")[2]
        if path.startswith(f"/api/models/{self.model_id}/tree/"):
            self._send(request, 200, json.dumps(self._tree()).encode(), body)
        elif path.startswith(f"/api/models/{self.model_id}"):
            self._send(request, 200, json.dumps(self._info()).encode(), body)
        elif path.startswith(f"/{self.model_id}/resolve/") and name in self.files:
            self._send_file(request, name, body)
        else:
            self._send(request, 404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

    def _info(self) -> dict[str, object]:
        siblings = [{"rfilename": name} for name in self.files]
        return {"id": self.model_id, "modelId": self.model_id, "sha": SHA, "siblings": siblings, "tags": []}

    def _tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in self.files.items()
        ]

    def _send_file(self, request: BaseHTTPRequestHandler, name: str, body: bool) -> None:
        if self.gated:
            self._send(request, 403, b"{}", body, {"X-Error-Code": "GatedRepo"})
            return
        if body:
            self.asked.append(name)
            self.open.wait(60)
        content = self.files[name]
        etag = hashlib.sha256(content).hexdigest()
        self._send(request, 200, content, body, {"ETag": f'"{etag}"', "X-Repo-Commit": SHA})

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        content: bytes,
        body: bool,
        headers: dict[str, str] | None = None,
    ) -> None:
        request.send_response(status)
        for key, value in (headers or {}).items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if body:
            request.wfile.write(content)
