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
from datetime import datetime
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

from query_mutator.errors import UsageError
from query_mutator.lab.analysis.html_page import html_document
from query_mutator.report.page.build import ASSETS, MARK, POLICY, REPORT_FILE

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
        """Send a page with the script that loads it again."""
        self._reply(with_body=True)

    def do_HEAD(self) -> None:
        """Send the headers of a page."""
        self._reply(with_body=False)

    def _reply(self, *, with_body: bool) -> None:
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        path = self.path.partition("?")[0]
        if not _HOSTS.fullmatch(host) or origin not in (None, f"http://{host}"):
            self._send(403, b"only pages that this server sent, at a name of this machine, may call it\n", "text/plain")
            return
        name = unquote(path.strip("/"))
        if path == "/":
            tag, page = _index(self.runs)
        elif path == f"/{quote(name)}/" and "/" not in name and name not in ("", ".", ".."):
            tag, page = _page(self.runs, name)
        else:
            self._send(404, b"not found; the runs are at /\n", "text/plain")
            return
        own = f"connect-src http://{host}{path}"
        body = b""
        if with_body:
            body = page().replace(html.escape(POLICY).encode(), html.escape(f"{POLICY}; {own}").encode(), 1)
            start, _, end = body.rpartition(b"</body>")
            body = start + _RELOAD.replace("TAG", tag).encode() + end
        self._send(200, body, "text/html", tag=tag, policy=f"{POLICY}; {own}; frame-ancestors 'none'")

    def _send(self, status: int, body: bytes, kind: str, *, tag: str = "", policy: str = "default-src 'none'") -> None:
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
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing for a request."""


Page = Callable[[], bytes]


def _page(runs: Path, name: str) -> tuple[str, Page]:
    """Return the tag and the page of a run; where there is none yet, one that waits for it."""
    path = runs / name / REPORT_FILE
    tag = _tag(path)
    if tag == _MISSING:
        return tag, lambda: _text(f"Waiting for {runs / name}: there is no page yet")
    return tag, lambda: _own(path) or _text(f"{name}: {REPORT_FILE} is not a page of a run")


def _own(path: Path) -> bytes | None:
    """Return a page that `write_page` made, None for another file."""
    try:
        found = path.read_bytes()
    except OSError:
        return None
    return found if MARK.encode() in found else None


def _tag(path: Path) -> str:
    """Return what changes when a page is written again."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except (OSError, ValueError):  # a name with a NUL
        return _MISSING
    return _MISSING if path.is_symlink() else f"{found.st_mtime_ns:x}-{found.st_ino:x}"


def _index(runs: Path) -> tuple[str, Page]:
    """Return the tag and the page that lists the runs with a page."""
    found = {path.parent.name: path for path in runs.glob(f"*/{REPORT_FILE}") if _tag(path) != _MISSING}
    newest = sorted(found, key=lambda name: found[name].stat().st_mtime, reverse=True)
    tag = blake2b("\n".join([*newest, *(_tag(found[name]) for name in newest)]).encode(), digest_size=8).hexdigest()

    def page() -> bytes:
        rows = [
            f'<li><a href="/{quote(name)}/">{html.escape(name)}</a> '
            f"{datetime.fromtimestamp(found[name].stat().st_mtime):%Y-%m-%d %H:%M:%S}</li>"
            for name in newest
        ]
        return _text(f"Runs in {runs}", f"<ul>{''.join(rows)}</ul>" if rows else "<p>There is no page yet.</p>")

    return tag, page


def _text(title: str, more: str = "") -> bytes:
    body = f"<main><h1>{html.escape(title)}</h1>{more}</main>"
    return html_document(title=title, style=_STYLE, body=body, policy=POLICY).encode()
