"""Write the page of one or several runs: the sections first, then what was said, compressed block by block.

The blocks of texts go through a temporary file, so the memory does not grow with the length of a run.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from query_mutator.errors import reason_of
from query_mutator.files import atomic_write
from query_mutator.lab.analysis.html_page import html_document
from query_mutator.report.page.figures import Price
from query_mutator.report.page.messages import Message, as_block
from query_mutator.report.page.questions import pairs_of
from query_mutator.report.page.run_reader import RunReader

logger = logging.getLogger(__name__)

REPORT_FILE = "report.html"  # of a run folder
MARK = "/* query-mutator report */"  # by which `qm report` knows its own files
#: Nothing is loaded: no script, picture or font from elsewhere, whatever a text in the page says.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)
_ASSETS = Path(__file__).with_name("assets")
_FIRST, _LAST = ("dom.js", "store.js"), "boot.js"  # scripts in this order, the others by name between them
_SMALL = ("section", "metrics")  # kinds of messages that the page shows first
_SPOOL_BYTES = 1 << 20
_BLOCKS = "<!-- blocks -->"


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


def write_page(folders: Sequence[str | Path], path: str | Path, *, price: Price | None = None) -> None:
    """Write the page of run folders to `path`; UsageError for another folder."""
    readers = [RunReader(folder, run=run, price=price) for run, folder in enumerate(folders)]
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as large:
        small = [message for reader in readers for message in _drain(reader, large)]
        if len(readers) > 1:
            small.append(pairs_of([(reader.name, reader.evaluation) for reader in readers]))
        before, after = page_parts(" · ".join(reader.name for reader in readers))
        large.seek(0)
        with atomic_write(path) as file:
            file.write(before)
            file.writelines(map(as_block, small))
            shutil.copyfileobj(large, file)
            file.write(after)


def _drain(reader: RunReader, large: IO[bytes]) -> list[Message]:
    """Return the small messages of a run as it is now; write the blocks of the others."""
    small: list[Message] = []
    for message in reader.messages():
        if message["kind"] in _SMALL:
            small.append(message)
        else:
            large.write(as_block(message))
    return small


def page_parts(title: str) -> tuple[bytes, bytes]:
    """Return the page before and after its blocks of messages."""
    style = f"{MARK}\n{_asset('page.css')}"
    body = f"{_asset('page.html')}\n{_BLOCKS}"
    names = sorted(path.name for path in _ASSETS.glob("*.js"))
    ordered = sorted(names, key=lambda name: (name == _LAST, name not in _FIRST))
    scripts = "\n".join(["<script>", '"use strict";', *map(_asset, ordered), "</script>", ""])
    before, after = html_document(title=title, style=style, body=body, scripts=scripts, policy=POLICY).split(_BLOCKS)
    return before.encode(), after.encode()


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
