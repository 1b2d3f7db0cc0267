"""Area: run folders with one random damage. Whatever reads them says what is wrong, or gives the same as before."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.attack.harness import Outcome
from benchmarks.attack.runs import (
    KINDS,
    MORE_STEPS,
    Read,
    Resumed,
    files_of,
    read,
    readers_of,
    resumed,
    run_of,
    undamaged,
    undamaged_resumed,
)

RESUMED_SHARE = 0.08  # of the cases: a resumption takes twenty times as long as reading
_LOSES_ROWS = ("truncate", "empty", "remove a line")  # at the end that is normal: rows may be missing there


def attack(rng: random.Random, folder: Path) -> Outcome:
    """Damage a copy of a run and read it with all readers, or resume it to its end."""
    kind = rng.choice(KINDS)
    run = Path(shutil.copytree(run_of(kind), folder / "run"))
    how = rng.choice(sorted(DAMAGES))
    what = DAMAGES[how](rng, run)
    case = f"{kind}: {how} {what}"
    if rng.random() < RESUMED_SHARE:
        detail = wrong_resumption(kind, run)
        return Outcome(case=f"{case}, resumed", verdict="wrong" if detail else "ok", detail=detail)
    for name, reader in readers_of(run_of(kind)).items():
        if not _falls_back(run, how, what, name):
            detail = wrong_reading(read(run, reader), undamaged(kind)[name], run, loses_rows=how in _LOSES_ROWS)
            if detail:
                return Outcome(case=case, verdict="wrong", detail=f"{name}: {detail}")
    return Outcome(case=case)


# --- damages: each returns what it did, enough to do it by hand ------------------------------------------------------


def _any_file(rng: random.Random, run: Path, *suffixes: str) -> Path:
    return rng.choice([path for path in files_of(run) if not suffixes or path.suffix in suffixes])


def flip(rng: random.Random, run: Path) -> str:
    """Flip one to four bits of a file."""
    path = _any_file(rng, run)
    content = bytearray(path.read_bytes())
    places = [(rng.randrange(len(content)), rng.randrange(8)) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
    for at, bit in places:
        content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"{path.relative_to(run)} at {places}"


def truncate(rng: random.Random, run: Path) -> str:
    """Drop the end of a file."""
    path = _any_file(rng, run)
    kept = rng.randrange(path.stat().st_size)
    path.write_bytes(path.read_bytes()[:kept])
    return f"{path.relative_to(run)} to {kept} bytes"


def insert(rng: random.Random, run: Path) -> str:
    """Insert random bytes into a file."""
    path = _any_file(rng, run)
    content, added = path.read_bytes(), rng.randbytes(rng.randrange(1, 40))
    at = rng.randrange(len(content) + 1)
    path.write_bytes(content[:at] + added + content[at:])
    return f"{path.relative_to(run)} at {at}: {added!r}"


def empty(rng: random.Random, run: Path) -> str:
    """Leave nothing of a file."""
    path = _any_file(rng, run)
    path.write_bytes(b"")
    return str(path.relative_to(run))


def remove(rng: random.Random, run: Path) -> str:
    """Remove a file."""
    path = _any_file(rng, run)
    path.unlink()
    return str(path.relative_to(run))


def replace_by_folder(rng: random.Random, run: Path) -> str:
    """Put a folder in a file's place."""
    path = _any_file(rng, run)
    path.unlink()
    path.mkdir()
    return str(path.relative_to(run))


def swap_files(rng: random.Random, run: Path) -> str:
    """Exchange two files."""
    one, other = rng.sample(files_of(run), 2)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    return f"{one.relative_to(run)} and {other.relative_to(run)}"


def copy_file(rng: random.Random, run: Path) -> str:
    """Overwrite a file with another one."""
    one, other = rng.sample(files_of(run), 2)
    shutil.copy(one, other)
    return f"{one.relative_to(run)} over {other.relative_to(run)}"


def _change_lines(rng: random.Random, run: Path, change: Callable[[list[bytes]], str]) -> str:
    path = _any_file(rng, run, ".jsonl", ".json")
    lines = path.read_bytes().splitlines(keepends=True)
    what = change(lines)
    path.write_bytes(b"".join(lines))
    return f"{path.relative_to(run)} {what}"


def swap_lines(rng: random.Random, run: Path) -> str:
    """Exchange two lines of a file."""

    def change(lines: list[bytes]) -> str:
        one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[one], lines[other] = lines[other], lines[one]
        return f"{one + 1} and {other + 1}"

    return _change_lines(rng, run, change)


def repeat_line(rng: random.Random, run: Path) -> str:
    """Repeat a line of a file somewhere."""

    def change(lines: list[bytes]) -> str:
        one, at = rng.randrange(len(lines)), rng.randrange(len(lines) + 1)
        lines.insert(at, lines[one])
        return f"{one + 1} before {at + 1}"

    return _change_lines(rng, run, change)


def remove_line(rng: random.Random, run: Path) -> str:
    """Remove a line of a file."""

    def change(lines: list[bytes]) -> str:
        at = rng.randrange(len(lines))
        del lines[at]
        return f"{at + 1} of {len(lines) + 1}"

    return _change_lines(rng, run, change)


DAMAGES: Mapping[str, Callable[[random.Random, Path], str]] = {
    "flip": flip,
    "truncate": truncate,
    "insert": insert,
    "empty": empty,
    "remove": remove,
    "replace by a folder": replace_by_folder,
    "swap": swap_files,
    "copy": copy_file,
    "swap lines": swap_lines,
    "repeat a line": repeat_line,
    "remove a line": remove_line,
}


# --- verdicts --------------------------------------------------------------------------------------------------------


def wrong_reading(now: Read, before: Read, run: Path, *, loses_rows: bool = False) -> str:
    """Return how a reader's result differs from the one before the damage without a word, "" where it does not."""
    if now.error or now.logged:
        names_it = str(run) in now.error + now.logged
        return "" if names_it else f"no file is named: {now.error} {now.logged}"
    if _is_same(now.value, before.value, loses_rows=loses_rows):
        return ""
    return f"another result, and nothing was reported: {str(now.value)[:1500]}"


def _is_same(now: Any, before: Any, *, loses_rows: bool) -> bool:
    """Return whether two results are the same but for entries that nothing reads, and rows missing at the end."""
    if isinstance(now, dict) and isinstance(before, dict):
        missing = before.keys() - now.keys()
        if missing and not loses_rows:
            return False
        return all(_is_same(now[key], before[key], loses_rows=loses_rows) for key in before.keys() - missing)
    if isinstance(now, list) and isinstance(before, list) and (loses_rows or len(now) == len(before)):
        pairs = zip(now, before, strict=False)
        return len(now) <= len(before) and all(_is_same(*pair, loses_rows=loses_rows) for pair in pairs)
    return bool(now == before)


def _falls_back(run: Path, how: str, what: str, reader: str) -> bool:
    """Return whether a reader does without a file that is absent or of an older version, as it is documented."""
    for name, readers in {"config.json": ("config", "analysis"), "summary.json": ("summary",)}.items():
        if reader in readers and (run / name).is_file() and _is_of_an_older_version(run / name):
            return True
    if how != "remove":
        return False
    fallbacks = {
        "config.json": ("reward", "analysis"),
        "metrics.jsonl": ("analysis",),
        "summary.json": ("summary",),
        "evaluation.jsonl": ("evaluation",),
    }
    return reader in fallbacks.get(what, ()) or (what.endswith(".pt") and reader in ("policy", "resume", what[12:]))


def _is_of_an_older_version(path: Path) -> bool:
    try:
        return "file_sha256" not in json.loads(path.read_bytes())
    except ValueError:
        return False


def wrong_resumption(kind: str, run: Path) -> str:
    """Return what is wrong with resuming a damaged run, "" for nothing."""
    now, before = resumed(run), undamaged_resumed(kind)
    outcome = now.ended.outcome()
    if outcome.verdict != "ok":
        return f"{outcome.verdict}: {outcome.detail}"
    names_it = str(run) in now.ended.err
    if now.ended.code != 0:
        return "" if names_it else f"no file is named: {now.ended.err}"
    grid = [(env, step) for env in range(2) for step in range(MORE_STEPS // 2)]
    if [(row["env"], row["step"]) for row in now.steps] != grid:
        return f"steps are missing or repeated: {[(row['env'], row['step']) for row in now.steps]}"
    if names_it and any(words in now.ended.err for words in ("using the previous one", "are repeated")):
        return ""
    return _difference(kind, now, before)


def _difference(kind: str, now: Resumed, before: Resumed) -> str:
    if kind.startswith("ppo") and (now.weights != before.weights or list(now.steps) != list(before.steps)):
        return f"other weights or steps, and nothing was reported: {now.ended.err}"
    return ""
