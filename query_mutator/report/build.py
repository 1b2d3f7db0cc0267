"""Write the page of one or several runs from the templates in `assets`, and serve the pages of a folder of runs.

What was said step by step is in blocks of compressed HTML, which the page's script unpacks. Pages are served to this
machine only, and only those that `write_page` made; a page loads itself again when its file was written again:

    /         the runs, newest page first
    /NAME/    NAME/report.html

Pages may have been made by others, so what one may ask for is itself.
"""

from __future__ import annotations

import base64
import functools
import gzip
import html
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from jinja2 import Environment, FileSystemLoader

from query_mutator.errors import UsageError, reason_of
from query_mutator.files import atomic_write, encode, html_document
from query_mutator.files.run_dir import METRICS
from query_mutator.report import charts
from query_mutator.report.run_reader import CALLS, LEARNING, RunReader, curves_of, pairs_of, word_diff
from query_mutator.types import wire_text

logger = logging.getLogger(__name__)

REPORT_FILE = "report.html"  # of a run folder
MARK = "/* query-mutator report */"  # by which `qm report` knows its own files
#: Nothing is loaded: no script, picture or font from elsewhere, whatever a text in the page says.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)
MAX_CHARS = 20_000  # of a text
_BLOCK_ROWS = 50
ASSETS = Path(__file__).with_name("assets")
_RUN_COLORS = (2, 1, 5, 3, 4, 7, 6, 8)


def write_report(folder: Path) -> Path | None:
    """Write the page of a run as it is now into its folder; warn and return None where that fails, whatever the reason.

    A run needs no page, and `qm show` writes it again.
    """
    path = folder / REPORT_FILE
    try:
        write_page([folder], path)
    except Exception as error:
        logger.warning("the report of %s could not be written (%s); try qm show %s", folder, reason_of(error), folder)
        return None
    return path


def write_page(folders: Sequence[str | Path], path: str | Path) -> None:
    """Write the page of run folders to `path`; UsageError for another folder."""
    page = page_of([RunReader(folder) for folder in folders])
    with atomic_write(path) as file:
        file.write(wire_text(page).encode())


def page_of(readers: Sequence[RunReader]) -> str:
    """Return the page of runs, next to each other where there are several."""
    labels = [reader.name for reader in readers]
    labels = [f"{name} ({n})" if labels.count(name) > 1 else name for n, name in enumerate(labels, 1)]
    colors = [f"var(--c{_RUN_COLORS[run % len(_RUN_COLORS)]})" for run in range(len(readers))]
    named = [(label, color, each.figures) for label, color, each in zip(labels, colors, readers, strict=True)]
    if len(readers) == 1:
        named = [(labels[0], "var(--accent)", readers[0].figures)]
    lines = next((reader.lines for reader in readers if reader.lines), [])
    operators = list(dict.fromkeys(name for reader in readers for name in reader.operators))
    sides, rows = _question_rows(readers)
    macros = _environment().get_template("transcript.html").module
    timed = any(reader.is_timed for reader in readers)
    held_out = [macros.question(row, sides, operators, timed) for row in rows]  # type: ignore[attr-defined]
    episodes = [{"run": run, **row} for run, reader in enumerate(readers) for row in reader.episode_rows]
    facts = [{"outcome": row["outcome"], "operator": row["operators"]} for row in episodes]
    ways = [macros.episode(row, operators) for row in episodes]  # type: ignore[attr-defined]
    body = _environment().get_template("page.html").render(
        runs=[*zip(labels, colors, readers, strict=True)],
        learning=curves_of(LEARNING, named, lines),
        calls=curves_of(CALLS, [each for each, reader in zip(named, readers, strict=True) if reader.is_timed]),
        pairs=pairs_of([(label, each.evaluation) for label, each in zip(labels, readers, strict=True)]),
        operators=operators,
        sides=sides,
        rows=rows,
        held_out=_blocks([_data(row) for row in rows], held_out),
        episodes=episodes,
        ways=_blocks(facts, ways),
    )  # fmt: skip
    style, script = (ASSETS.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    scripts = f'<script>\n"use strict";\n{script}</script>\n'
    title = f"{' and '.join(labels)} · Query Mutator"
    return html_document(title=title, style=f"{MARK}\n{style}", body=body, scripts=scripts, policy=POLICY)


@functools.cache
def _environment() -> Environment:
    """Return the templates, which escape every text."""
    found = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    found.add_extension("jinja2.ext.do")
    helpers = {name: value for name, value in vars(charts).items() if callable(value) and not name.startswith("_")}
    found.filters |= helpers | {
        "place": lambda value, axis: axis.at(value),
        "twice": lambda value: (value, value),
        "dashed": lambda line: f"{line['name']} on {line['of']} questions",
    }
    found.globals |= helpers | {
        "percent0": lambda share: charts.percent(share, 0),
        "signed2": lambda value: charts.signed(value, 2),
        "max_chars": MAX_CHARS,
        "word_diff": word_diff,
        "metrics": METRICS,
    }
    return found


def _question_rows(readers: Sequence[RunReader]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the sides, which are methods of runs, and the questions of all runs with what each side did."""
    sides: list[dict[str, Any]] = []
    for run, reader in enumerate(readers):
        names = list(dict.fromkeys(name for question in reader.questions for name in question["ways"]))
        names.sort(key=lambda name: [*charts.METHODS, name].index(name))
        letter = f" {chr(65 + run % 26)}" if len(readers) > 1 else ""
        for name in names:
            shown = {"place": len(sides), "shown": run == 0 or name == "policy"}
            sides.append({"run": run, "method": name, "name": f"{name}{letter}", **shown})
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for run, reader in enumerate(readers):
        for question in reader.questions:
            row = rows.setdefault((question["set"], question["id"]), {**question, "in_runs": {}})
            row["in_runs"][run] = question["ways"]
    for row in rows.values():
        row["ways"] = [row["in_runs"].get(side["run"], {}).get(side["method"]) for side in sides]
        row["outcomes"] = [way["outcome"] if way else "missing" for way in row["ways"]]
    return sides, [*rows.values()]


def _data(row: dict[str, Any]) -> dict[str, Any]:
    """Return what filters and sorting need of a question, for each side."""
    ways = [way or {"score": None, "calls": None, "steps": []} for way in row["ways"]]
    return {
        "set": row["set"],
        "tag": row["tags"],
        "outcomes": row["outcomes"],
        "scores": [way["score"] for way in ways],
        "calls": [way["calls"] for way in ways],
        "operators": [[step["name"] for step in way["steps"] if step["name"]] for way in ways],
    }


def _blocks(facts: Sequence[dict[str, Any]], details: Sequence[str]) -> Iterator[str]:
    """Yield JSON in compressed blocks, in base64: the facts of rows first, then the HTML of some rows in each."""
    parts = [[*map(str, details[start : start + _BLOCK_ROWS])] for start in range(0, len(details), _BLOCK_ROWS)]
    for part in (facts, *parts):
        yield base64.b64encode(gzip.compress(encode(part), mtime=0)).decode()


# --- the server ------------------------------------------------------------------------------------------------------

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
