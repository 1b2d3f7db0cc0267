"""A small Hugging Face hub: the routes that huggingface_hub asks for data sets, over HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit


class HubServer:
    """Serves files by (repository, revision); `requests` has the paths that were asked for."""

    def __init__(self, files: dict[tuple[str, str], dict[str, bytes]], *, gated: tuple[str, ...] = ()) -> None:
        self.files, self.gated = files, gated
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def commit(self, name: str, revision: str) -> str:
        """Return a commit hash for what a revision holds."""
        content = sorted(self.files[name, revision].items())
        return hashlib.sha1(repr((name, revision, content)).encode()).hexdigest()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = urlsplit(request.path).path
        self.requests.append(path)
        if path.startswith("/api/datasets/"):
            name, _, rest = path.removeprefix("/api/datasets/").partition("/revision/")
            if not rest:
                name, _, rest = path.removeprefix("/api/datasets/").partition("/tree/")
                self._reply_api(request, name, unquote(rest), tree=True)
            else:
                self._reply_api(request, name, unquote(rest), tree=False)
            return
        name, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        known = self._revision(name, unquote(revision))
        content = self.files[name, known].get(unquote(file)) if known else None
        if known is None or content is None:
            self._send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        etag = hashlib.sha1(content).hexdigest()
        self._send(request, 200, content, {"X-Repo-Commit": self.commit(name, known), "ETag": f'"{etag}"'})

    def _reply_api(self, request: BaseHTTPRequestHandler, name: str, revision: str, *, tree: bool) -> None:
        if name in self.gated:
            self._send(request, 403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        if name not in {repository for repository, _ in self.files}:
            self._send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        known = self._revision(name, revision)
        if known is None:
            self._send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        files = self.files[name, known]
        rows = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
        ]
        siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
        about = {"id": name, "sha": self.commit(name, known), "private": False, "tags": [], "siblings": siblings}
        self._send(request, 200, json.dumps(rows if tree else about).encode(), {"Content-Type": "application/json"})

    def _revision(self, name: str, revision: str) -> str | None:
        """Return the branch that a branch's name or a commit hash means."""
        branches = [branch for repository, branch in self.files if repository == name]
        return next((found for found in branches if revision in (found, self.commit(name, found))), None)

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)
