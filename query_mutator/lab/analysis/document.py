"""A report as paragraphs, lists, tables and figures, rendered as terminal text, Markdown or reStructuredText."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from query_mutator.cli.console import table

__all__ = ["Block", "Bullets", "Cell", "Code", "Document", "Figure", "Format", "Row", "Section", "Table"]

Format = Literal["text", "markdown", "rst"]

_RST_RULES = "=-~^"


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table, and the source of its number."""

    text: str
    trace: str = ""  # run, tag and x

    def __str__(self) -> str:
        return self.text


Row = tuple[str | Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under a header; the first column names the row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure: SVG source, and the name of its file."""

    caption: str
    file: str
    svg: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bullets:
    """A list of remarks."""

    items: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A block of shell commands."""

    text: str


Block = str | Table | Figure | Bullets | Code


@dataclass(frozen=True, slots=True)
class Section:
    """A title and the blocks under it; `level` 0 is the title of the page."""

    title: str
    blocks: Sequence[Block]
    level: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A whole report."""

    sections: Sequence[Section]

    def render(self, format: Format) -> str:
        """Return the report as text, Markdown or reStructuredText."""
        lines = [line for section in self.sections for line in _section(section, format)]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _section(section: Section, format: Format) -> Iterator[str]:
    if format == "markdown":
        yield from (f"{'#' * (section.level + 1)} {section.title}", "")
    elif format == "rst":
        title = _escape_rst(section.title)
        yield from (title, _RST_RULES[section.level] * len(title), "")
    elif section.blocks:
        yield from (section.title.upper() if section.level < 2 else section.title, "")
    escape = _escape_rst if format == "rst" else str
    for block in section.blocks:
        if isinstance(block, str):
            yield escape(block)
        elif isinstance(block, Bullets):
            yield from (f"- {escape(item)}" for item in block.items)
        else:
            yield from _WRITERS[format](block)
        yield ""


def _as_text(block: Code | Figure | Table) -> Iterator[str]:
    if isinstance(block, Code):
        yield from (f"    {line}" for line in block.text.splitlines())
    elif isinstance(block, Table):
        yield table(block.title, block.header, [[str(cell) for cell in row] for row in block.rows])


def _as_markdown(block: Code | Figure | Table) -> Iterator[str]:
    if isinstance(block, Code):
        yield from ("```bash", block.text, "```")
    elif isinstance(block, Figure):
        yield f"![{block.caption}]({block.file})"
    else:
        yield from (f"*{block.title}*", "", _markdown_row(block.header))
        yield "|" + "|".join(["---", *["---:"] * (len(block.header) - 1)]) + "|"
        yield from map(_markdown_row, block.rows)


def _markdown_row(row: Sequence[str | Cell]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


def _as_rst(block: Code | Figure | Table) -> Iterator[str]:
    if isinstance(block, Code):
        yield from (".. code-block:: bash", "", *(f"   {line}" for line in block.text.splitlines()))
    elif isinstance(block, Figure):
        yield from (f".. figure:: {block.file}", "", f"   {_escape_rst(block.caption)}")
    else:
        yield from (f".. list-table:: {_escape_rst(block.title)}", "   :header-rows: 1", "")
        for row in (block.header, *block.rows):
            for place, cell in enumerate(row):
                yield f"   {'  -' if place else '* -'} {_escape_rst(str(cell))}".rstrip()


def _escape_rst(text: str) -> str:
    """Escape all markup in a text."""
    return re.sub(r"([\\*`|_])", r"\\\1", text)


_WRITERS = {"text": _as_text, "markdown": _as_markdown, "rst": _as_rst}
