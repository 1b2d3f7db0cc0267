"""What `reference-assistant` knows: small tables that come with every Python, one sentence per entry.

The tables are those of `unicodedata`, `http`, `errno`, `signal`, `mimetypes`, `encodings` and `locale` as Python ships
them: no file of the machine, time zone or language setting changes them. Numbers and descriptions of errors and signals
are those of the operating system.
"""

from __future__ import annotations

import errno
import http
import locale
import mimetypes
import os
import signal
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from encodings.aliases import aliases
from html.entities import html5

__all__ = ["characters", "facts"]

#: First and last code point of the blocks whose characters people look up; all are older than Unicode 12.
BLOCKS = (
    *((0x0020, 0x007E), (0x00A0, 0x017F), (0x0370, 0x03FF), (0x0410, 0x044F)),  # Latin, Greek, Cyrillic
    *((0x2010, 0x205E), (0x2070, 0x209C), (0x20A0, 0x20BF), (0x2100, 0x218B)),  # punctuation, currency, letterlike
    *((0x2190, 0x23FF), (0x2500, 0x27BF)),  # arrows, mathematics, technical, boxes, shapes, dingbats
    *((0x1F300, 0x1F64F), (0x1F680, 0x1F6C5), (0x1F900, 0x1F9FF)),  # pictographs and emoji
)


def characters() -> Iterator[str]:
    """Yield a sentence for each character of BLOCKS that has a name and does not break a line."""
    entities: dict[str, str] = {}
    for entity, text in sorted(html5.items(), key=lambda item: (len(item[0]), item[0])):
        if entity.endswith(";"):
            entities.setdefault(text, entity)
    for first, last in BLOCKS:
        for char in map(chr, range(first, last + 1)):
            name = unicodedata.name(char, "")
            if name and unicodedata.category(char) not in ("Zl", "Zp"):
                shown = f" {char}" if char.isprintable() else ""
                entity = entities.get(char, f"#{ord(char)};")
                yield f"The character{shown} is `{name}`, U+{ord(char):04X} in Unicode and `&{entity}` in HTML."


def facts() -> Iterator[str]:
    """Yield a sentence for each entry of the other tables."""
    yield from _http()
    yield from _errors()
    yield from _signals()
    yield from _mime_types()
    yield from _encodings()
    yield from _locales()


def _http() -> Iterator[str]:
    for status in http.HTTPStatus:
        yield _sentence(f"HTTP status {status.value} is `{status.phrase}`", status.description)
    for method in http.HTTPMethod:
        yield _sentence(f"The HTTP method is `{method.value}`", method.description)


def _errors() -> Iterator[str]:
    for number, name in sorted(errno.errorcode.items()):
        raised = type(OSError(number, "")).__name__
        yield _sentence(f"The error code is `{name}`, number {number}, raised as {raised}", os.strerror(number))


def _signals() -> Iterator[str]:
    for one in signal.Signals:
        yield _sentence(f"The signal is `{one.name}`, number {one.value}", signal.strsignal(one) or "")


def _mime_types() -> Iterator[str]:
    """Yield the types that Python itself knows, without the files of this machine."""
    extensions = defaultdict(list)
    for extension, mime_type in mimetypes.MimeTypes().types_map[True].items():
        extensions[mime_type].append(extension)
    for mime_type, known in extensions.items():
        yield f"The MIME type of {' or '.join(known)} files is `{mime_type}`."


def _encodings() -> Iterator[str]:
    others = defaultdict(list)
    for alias, codec in aliases.items():
        others[codec].append(alias)
    for codec, known in others.items():
        yield f"The text encoding is `{codec}`, also called {', '.join(known)}."


def _locales() -> Iterator[str]:
    for language, name in locale.locale_alias.items():
        if language.isalpha() and len(language) > 3:  # the others are codes such as de_at
            yield f"The locale of {language} is `{name}`."


def _sentence(start: str, description: str) -> str:
    return f"{start}: {description.rstrip('.')}." if description else f"{start}."
