"""The frame of every HTML page that a command writes: one file, light and dark."""

from __future__ import annotations

import html

__all__ = ["html_document"]

#: Colors of every page, light and dark: text has a contrast of at least 4.5 with what is behind it.
_BASE = """
:root { color-scheme: light dark; --paper: light-dark(#fff, #10151a); --stripe: light-dark(#f5f7f7, #182027);
  --ink: light-dark(#16212b, #e7edf1); --dim: light-dark(#55626e, #a2b0bb); --line: light-dark(#dfe5e6, #2b3740);
  --accent: light-dark(#0a6a73, #5fcbd4); --good: light-dark(#17703a, #62d08a); --bad: light-dark(#b3261e, #ff938a); }
""".strip()


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
