"""Self-contained HTML pages: `html_document` is the base of all of them, `html_page` that of a comparison of runs.

In a comparison tooltips show the source of each number, and curves are inline SVG.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from query_mutator.lab.analysis.document import Block, Bullets, Cell, Code, Document, Figure, Table

__all__ = ["html_document", "html_page"]

#: Colors of every page, light and dark: text has a contrast of at least 4.5 with what is behind it.
_BASE = """
:root { color-scheme: light dark; --paper: light-dark(#fff, #10151a); --stripe: light-dark(#f5f7f7, #182027);
  --ink: light-dark(#16212b, #e7edf1); --dim: light-dark(#55626e, #a2b0bb); --line: light-dark(#dfe5e6, #2b3740);
  --accent: light-dark(#0a6a73, #5fcbd4); --good: light-dark(#17703a, #62d08a); --bad: light-dark(#b3261e, #ff938a); }
""".strip()
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { color: var(--accent); line-height: 1.25; margin: 1.8em 0 .5em; }
h1 { margin-top: 0; }
.scroll { overflow-x: auto; margin: .8rem 0 1.4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--dim); padding-bottom: .3rem; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
tbody tr:nth-child(even) { background: var(--stripe); }
td[title] { text-decoration: underline dotted var(--dim); cursor: help; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
figcaption { color: var(--dim); }
pre { background: var(--stripe); padding: .7rem; overflow-x: auto; }
figure svg { background: #fff; }
.better { color: var(--good); font-weight: 600; } .worse { color: var(--bad); font-weight: 600; }
.equivalent, .inconclusive { color: var(--dim); }
""".strip()
_VERDICTS = ("better", "worse", "equivalent", "inconclusive")


def html_document(*, title: str, style: str, body: str, scripts: str = "", policy: str = "") -> str:
    """Return a whole page: `style` follows the base colors, `scripts` the body; `title` is text, the rest markup.

    `policy` is the Content-Security-Policy, which says what the page may load.
    """
    meta = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n' if policy else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"{meta}<title>{html.escape(title)}</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_BASE}\n{style}\n</style>\n</head>\n<body>\n{body}\n{scripts}</body>\n</html>\n"
    )


def html_page(document: Document) -> str:
    """Return the page of a report."""
    title = document.sections[0].title if document.sections else "Report"
    body = "\n".join(
        line for section in document.sections for line in _section(section.title, section.level, section.blocks)
    )
    return html_document(title=title, style=_STYLE, body=body)


def _section(title: str, level: int, blocks: Sequence[Block]) -> Iterator[str]:
    yield f"<h{level + 1}>{html.escape(title)}</h{level + 1}>"
    for block in blocks:
        yield _block(block)


def _block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{html.escape(block)}</p>"
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Code):
        return f"<pre><code>{html.escape(block.text)}</code></pre>"
    if isinstance(block, Figure):
        return f"<figure>{_inline(block.svg)}<figcaption>{html.escape(block.caption)}</figcaption></figure>"
    return _table(block)


def _table(block: Table) -> str:
    head = "".join(f'<th scope="col">{html.escape(cell).replace(" %", "&nbsp;%")}</th>' for cell in block.header)
    rows = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in block.rows)
    caption = f"<caption>{html.escape(block.title)}</caption>"
    return f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _cell(cell: str | Cell) -> str:
    text = html.escape(str(cell))
    if str(cell) in _VERDICTS:
        return f'<td class="{text}">{text}</td>'
    if isinstance(cell, Cell) and cell.trace:
        return f'<td title="{html.escape(cell.trace)}">{text}</td>'
    return f"<td>{text}</td>"


def _inline(svg: str) -> str:
    """Return the SVG element without the declarations of a file."""
    return re.sub(r"^.*?(?=<svg)", "", svg, flags=re.DOTALL)
