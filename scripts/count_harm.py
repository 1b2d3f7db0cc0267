"""Count what local operators and forms change in sentences that are right as they are, from texts on this machine.

python scripts/count_harm.py ../shared/data
"""

from __future__ import annotations

import gettext
import gzip
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from sysconfig import get_path

from query_mutator.forms import FORMS, FormContext
from query_mutator.operators import OPERATORS, OperatorContext, english_words, local_rewrite

TALK = (
    "Say hello. {}",
    "My aunt wrote: {} Thanks! What did she mean?",
    "Translate to French: hi! {}",
    "Hi is short. {}",
)


def first(texts: Iterable[str], count: int = 1800) -> list[str]:
    return sorted(set(texts), key=lambda text: hashlib.sha256(text.encode("utf-8", "replace")).digest())[:count]


def sentences(texts: Iterable[str]) -> list[str]:
    parts = (part for text in texts for part in re.split(r"(?<=[.?!])\s+(?=[A-Z])|\n\s*\n", text))
    return [part.strip() for part in parts if 12 < len(part) < 400]


def read(paths: Iterable[Path]) -> list[str]:
    return [path.read_text("utf-8", "replace") for path in sorted(paths) if path.is_file()]


def messages(place: int) -> Iterator[str]:
    for path in sorted(Path("/usr/share/locale").glob("*/LC_*/*.mo"))[::20]:
        with suppress(UnicodeDecodeError), path.open("rb") as file:
            said = gettext.GNUTranslations(file)._catalog.items()  # type: ignore[attr-defined]
            yield from (pair[place] for pair in said if isinstance(pair[0], str) and 12 < len(pair[place]) < 400)


def kinds(data: Path) -> Iterator[tuple[str, Iterable[str]]]:
    logs = [gzip.decompress(path.read_bytes()).splitlines() for path in data.glob("*/logs.jsonl.gz")]
    asked = [row["question"] for rows in logs for row in map(json.loads, rows) if row["part"] == "train"]
    site = Path(get_path("purelib"))
    source = read(site.glob("[n-z]*/*.py"))
    notes = first(sentences(note for text in source for note in re.findall('"""(.+?)"""', text, re.DOTALL)), 7000)
    metadata = [dist.metadata for dist in distributions()]
    yield "questions of sets", asked
    yield "licenses", sentences(read([*site.rglob("LICENSE*"), *Path("/usr/share/common-licenses").glob("*")]))
    yield "docstrings", notes
    yield "code", [line.strip() for text in source for line in text.split("\n") if line]
    yield "pages of packages", sentences(found.get_payload() or "" for found in metadata)  # type: ignore[attr-defined]
    yield "names of products", [f"how do i use {found['Name']}? {found['Summary']}" for found in metadata]
    yield "messages of programs", messages(0)  # in English
    yield "other languages", messages(1)
    yield "questions about words", [f"how do you spell {word}?" for word in english_words()]
    yield "a statement before the question", [f"{pair[0]} {pair[1]}" for pair in zip(notes, first(asked), strict=False)]
    yield "quoted text", [f'Who wrote "{note}"? Thank you.' for note in notes]
    yield "greetings that are meant", [how.format(note) for note in notes for how in TALK]


total = harmed = 0
for kind, texts in kinds(Path(sys.argv[1])):
    chosen = first(texts)
    local = [rewrite for name in OPERATORS.names() if (rewrite := local_rewrite(OPERATORS.get(name)))]
    changed = [text for text in chosen for rewrite in local if rewrite(text, context=OperatorContext()) != text]
    framed = ((text, FORMS.get(name).frame(text, context=FormContext())) for text in chosen for name in FORMS.names())
    changed += [text for text, asked in framed if text not in asked.messages[-1].content]
    total, harmed = total + len(chosen), harmed + len(changed)
    print(f"{kind:34} {len(chosen):6,} {len(changed):6,}", *map(repr, changed[:9]), sep="\n    ")
print(f"{'all':34} {total:6,} {harmed:6,}")
