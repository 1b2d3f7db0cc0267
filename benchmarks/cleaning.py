"""How much of what spoiled a question the local cleaning operators undo, without a model.

    python -m benchmarks.cleaning                 # training questions of `general`; --part validation, --show 5
    python -m benchmarks.cleaning --libraries     # spelling alone, against libraries on their own (pip install them)

`query` of the file is the spoiled text, `clean` the text before. Words are compared without case and punctuation.
"restored" is the share of misspelt words, "broken" that of right words, "names" that of capitalized ones.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from query_mutator import operators
from query_mutator.data.bundled import FOLDER
from query_mutator.data.split import fold_of, in_test
from query_mutator.operators import OperatorContext
from query_mutator.operators.english import like, pieces, split_word
from query_mutator.types import Question

VALIDATION_FOLD = 0
OPERATORS = ("shorthand", "typos", "courtesy", "core", "tidy", "clean")


class Row(NamedTuple):
    """A question as it was spoiled and before, with its kind."""

    query: str
    clean: str
    kind: str


class Counts(NamedTuple):
    """What became of the words of a text: counts, and words of edit distance to the clean text."""

    wrong: int = 0
    restored: int = 0
    right: int = 0
    broken: int = 0
    names: int = 0
    names_broken: int = 0


def rows(part: str) -> list[Row]:
    """Return the questions of a part: train, validation (one fold of it) or test."""
    found = []
    for line in (FOLDER / "general.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        question = Question(id="", text=row["query"], about=row["about"])
        held_out = in_test(question)
        if (part == "test") == held_out and (part != "validation" or fold_of(question) == VALIDATION_FOLD):
            found.append(Row(row["query"], row["clean"], row["tags"][0]))
    return found


def words(text: str, *, keep_case: bool = False) -> list[str]:
    """Return the words of a text without the punctuation around them."""
    found = [word.strip(".,;:!?…()") for word in (text if keep_case else text.casefold()).split()]
    return [word for word in found if word]


def distance(one: Sequence[str], two: Sequence[str]) -> int:
    """Return the word edit distance."""
    last = list(range(len(two) + 1))
    for at, word in enumerate(one, 1):
        row = [at]
        for to, other in enumerate(two, 1):
            row.append(min(last[to - 1] + (word != other), last[to] + 1, row[-1] + 1))
        last = row
    return last[-1]


def aligned(texts: Sequence[str], others: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield for each word of a text its index and what stands for it in another text, "" where it was dropped."""
    for tag, start, end, to, stop in difflib.SequenceMatcher(None, texts, others, autojunk=False).get_opcodes():
        for at in range(start, end):
            if tag == "replace" and end - start != stop - to:
                yield at, " ".join(others[to:stop])
            else:
                yield at, others[to + at - start] if tag in ("equal", "replace") else ""


def counts(row: Row, output: str) -> Counts:
    """Return what became of the words of a misspelt or plain question."""
    typed = words(row.query)
    cased = words(row.query, keep_case=True)
    meant, got = dict(aligned(typed, words(row.clean))), dict(aligned(typed, words(output)))
    wrong = [at for at, word in enumerate(typed) if meant[at] != word]
    right = [at for at, word in enumerate(typed) if meant[at] == word]
    names = [at for at in right if at and cased[at][:1].isupper()]
    return Counts(
        len(wrong),
        sum(got[at] == meant[at] for at in wrong),
        len(right),
        sum(got[at] != meant[at] for at in right),
        len(names),
        sum(got[at] != meant[at] for at in names),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("train", "validation", "test"), default="train")
    parser.add_argument("--show", type=int, default=0, help="texts of each kind that `clean` did not restore")
    parser.add_argument(
        "--libraries", action="store_true", help="compare `typos` with the libraries that are installed"
    )
    options = parser.parse_args(argv)
    known = rows(options.part)
    print(f"{len(known)} questions ({options.part})")
    if options.libraries:
        for name, load in {**LIBRARIES, "typos": lambda: operator("typos")}.items():
            report(name, load, known, options.show)
        return
    for name in OPERATORS:
        report(name, functools.partial(operator, name), known, options.show)


def operator(name: str) -> Callable[[str], str]:
    """Return a cleaning operator as a function of the text."""
    local = operators.local_rewrite(operators.get(name))
    assert local is not None
    return functools.partial(local, context=OperatorContext())


def by_word(correct: Callable[[str], str | None]) -> Callable[[str], str]:
    """Return a corrector of words as one of texts, for unquoted words in lower case and a first one."""

    def one(piece: str, is_first: bool) -> str:
        before, word, after = split_word(piece) or ("", "", "")
        if len(word) < 3 or not word.isalpha() or not (word.islower() or (is_first and word.istitle())):
            return piece
        return before + like(word, correct(word.lower()) or word) + after

    return lambda text: "".join(one(piece, not at) for at, piece in enumerate(pieces(text)))


def symspell() -> Callable[[str], str]:
    """Return symspellpy's most likely word."""
    from symspellpy import SymSpell, Verbosity

    index = SymSpell(max_dictionary_edit_distance=2)
    index.load_dictionary(str(resources.files("symspellpy") / "frequency_dictionary_en_82_765.txt"), 0, 1)
    return by_word(lambda word: next((found.term for found in index.lookup(word, Verbosity.TOP, 2)), None))


def pyspellchecker() -> Callable[[str], str]:
    """Return pyspellchecker's correction."""
    from spellchecker import SpellChecker

    return by_word(SpellChecker().correction)


def autocorrect() -> Callable[[str], str]:
    """Return autocorrect's correction."""
    from autocorrect import Speller

    return by_word(Speller("en"))


LIBRARIES = {"symspellpy": symspell, "pyspellchecker": pyspellchecker, "autocorrect": autocorrect}


def memory_mb() -> float:
    """Return the memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def report(name: str, load: Callable[[], Callable[[str], str]], known: Sequence[Row], show: int) -> None:
    """Print what a rewrite does to questions of every kind; a library that is not installed is left out."""
    start, used_mb = time.perf_counter(), memory_mb()
    try:
        rewrite = load()
    except ImportError:
        print(f"\n{name}: not installed")
        return
    rewrite("waht is teh first word")
    load_s, used_mb = time.perf_counter() - start, memory_mb() - used_mb
    by_kind: dict[str, list[tuple[Row, str]]] = defaultdict(list)
    seconds = []
    for row in known:
        start = time.perf_counter()
        output = rewrite(row.query)
        seconds.append(time.perf_counter() - start)
        by_kind[row.kind].append((row, output))
    seconds.sort()
    p50, p99 = seconds[len(seconds) // 2] * 1e3, seconds[int(len(seconds) * 0.99)] * 1e3
    print(f"\n{name}: first call {load_s:.2f} s, {used_mb:.0f} MB, then p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    print(f"{'kind':16}{'n':>5}{'word error %':>16}{'same words %':>16}{'same text %':>16}  restored  broken  names")
    for kind, pairs in sorted(by_kind.items()):
        print(line_of(kind, pairs))
        for row, output in [pair for pair in pairs if words(pair[1]) != words(pair[0].clean)][:show]:
            print(f"    {row.query!r}\n    {output!r}\n    {row.clean!r}")


def line_of(kind: str, pairs: Sequence[tuple[Row, str]]) -> str:
    """Return a line: before -> after for each figure."""
    total = sum(len(words(row.clean)) for row, _ in pairs)

    def percent(count: float, of: float) -> float:
        return 100 * count / of if of else 0.0

    def change(figure: Callable[[Row, str], Any], of: int) -> str:
        before, after = (
            sum(figure(row, text) for row, text in group) for group in ([(r, r.query) for r, _ in pairs], pairs)
        )
        return f"{percent(before, of):6.1f} -> {percent(after, of):5.1f}"

    error = change(lambda row, text: distance(words(text), words(row.clean)), total)
    same_words = change(lambda row, text: words(text) == words(row.clean), len(pairs))
    same_text = change(lambda row, text: text == row.clean, len(pairs))
    line = f"{kind:16}{len(pairs):5}{error:>16}{same_words:>16}{same_text:>16}"
    if kind in ("misspelt", "plain", "two-part"):
        all_counts = Counts(*map(sum, zip(*(counts(row, text) for row, text in pairs), strict=True)))
        line += (
            f"{percent(all_counts.restored, all_counts.wrong):9.1f}{percent(all_counts.broken, all_counts.right):8.2f}"
        )
        line += f"{percent(all_counts.names_broken, all_counts.names):7.2f}"
    return line


if __name__ == "__main__":
    main()
