"""The pages of a folder of runs, served to this machine: a page loads itself again when its file was written again.

    /         the runs, newest page first
    /NAME/    NAME/report.html

A file is served only if `write_page` made it. Pages may have been made by others, so what one may ask for is itself.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

from query_mutator.errors import UsageError
from query_mutator.files import html_document
from query_mutator.report.build import ASSETS, MARK, POLICY, REPORT_FILE

HOST = "127.0.0.1"
REQUEST_S = 30.0  # in which a client sends its request
_HOSTS = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?")  # else a page of another site asks, by DNS rebinding
_MISSING = "0"  # the tag of a page that is not there yet
_STYLE = "body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 3rem; }"
_RELOAD = f'<script>\n"use strict";\n{ASSETS.joinpath("reload.js").read_text(encoding="utf-8")}</script>\n</body>'


def serve_pages(folder: Path, *, port: int, on_listening: Callable[[str], object]) -> None:
    """Serve until interrupted; `on_listening` is called with the address. Raises UsageError for a port in use."""

    class Handler(_Handler):
        runs = folder

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"port {port} of {HOST} cannot be used ({reason}); choose another with --port") from error
    with server:
        on_listening(f"http://{HOST}:{server.server_port}/")
        server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    """GET and HEAD of the pages; http.server answers 501 to other methods."""

    runs: Path
    timeout = REQUEST_S

    def do_GET(self) -> None:
        """Send a page, and of a run the script that loads it again; for HEAD the headers alone."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        path = self.path.partition("?")[0]
        name = unquote(path.strip("/"))
        if not _HOSTS.fullmatch(host) or origin not in (None, f"http://{host}"):
            self._send(403, b"only pages that this server sent, at a name of this machine, may call it\n", "text/plain")
        elif path == "/":
            self._send(200, _index(self.runs), policy=f"{POLICY}; frame-ancestors 'none'")
        elif path != f"/{quote(name)}/" or "/" in name or name in ("", ".", ".."):
            self._send(404, b"not found; the runs are at /\n", "text/plain")
        else:
            own, tag = f"connect-src http://{host}{path}", _tag(self.runs / name / REPORT_FILE)
            page = _page(self.runs, name, tag) if self.command == "GET" else b""
            page = page.replace(html.escape(POLICY).encode(), html.escape(f"{POLICY}; {own}").encode(), 1)
            start, _, end = page.rpartition(b"</body>")
            page = start + _RELOAD.replace("TAG", tag).encode() + end
            self._send(200, page, tag=tag, policy=f"{POLICY}; {own}; frame-ancestors 'none'")

    do_HEAD = do_GET

    def _send(
        self, status: int, body: bytes, kind: str = "text/html", *, tag: str = "", policy: str = "default-src 'none'"
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            **({"ETag": f'"{tag}"'} if tag else {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing for a request."""


def _page(runs: Path, name: str, tag: str) -> bytes:
    """Return the page of a run that `write_page` made; where there is none yet, one that waits for it."""
    if tag == _MISSING:
        return _text(f"Waiting for {runs / name}: there is no page yet")
    with suppress(OSError):
        found = (runs / name / REPORT_FILE).read_bytes()
        if MARK.encode() in found:
            return found
    return _text(f"{name}: {REPORT_FILE} is not a page of a run")


def _tag(path: Path) -> str:
    """Return what changes when a page is written again."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except (OSError, ValueError):  # a name with a NUL
        return _MISSING
    return _MISSING if path.is_symlink() else f"{found.st_mtime_ns:x}-{found.st_ino:x}"


def _index(runs: Path) -> bytes:
    """Return the page that lists the runs with a page, the newest first."""
    found = [path for path in runs.glob(f"*/{REPORT_FILE}") if _tag(path) != _MISSING]
    rows = [
        f'<li><a href="/{quote(path.parent.name)}/">{html.escape(path.parent.name)}</a> '
        f"{datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d %H:%M:%S}</li>"
        for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    ]
    return _text(f"Runs in {runs}", f"<ul>{''.join(rows)}</ul>" if rows else "<p>There is no page yet.</p>")


def _text(title: str, more: str = "") -> bytes:
    body = f"<main><h1>{html.escape(title)}</h1>{more}</main>"
    return html_document(title=title, style=_STYLE, body=body, policy=POLICY).encode()
