"""Damage to files that know their structure: every mutation changes one file in place and says what it did."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from query_mutator.files import parse_json

__all__ = ["damage"]

Mutation = Callable[[random.Random, Path], object]

#: JSON in place of a value: other types, numbers beyond every range, texts that cannot be encoded.
VALUES = (
    "null", "true", "7", "-1", "0.5", "1e999", "NaN", "-Infinity", "9" * 400, "9" * 5000, '""', '"   "', '"\\ud800"',
    '"\\u0000"', '"\u202e\u001b[31m"', "[]", "{}", "[[1]]", '{"a": {"b": null}}', "[" * 300 + "]" * 300,
    '{"a":' * 2000 + "1" + "}" * 2000, "[" * 200_000, '"' + "x" * 200_000 + '"', '["a", 1, null]', "[1, -1]", "[1e20]",
)  # fmt: skip
_VALUE = re.compile(rb'(?<=: )("(?:[^"\\]|\\.)*"|-?[0-9.eE+-]+|true|false|null|\[[^\[\]]*\])|(?<=:)("[^"]*"|-?\d+)')
CELLS = ("", " ", '"', '"open', "a,b", "x" * 200_000, "\x00", "=1+1", "nan", "9" * 400, "\u202e", "\r", "\\ud800")


def damage(rng: random.Random, path: Path, *, subtle: bool = False) -> str:
    """Damage a file, or a file in a folder; return how. Subtle damage keeps the structure: only checksums find it."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return f"{damage(rng, rng.choice(files), subtle=subtle)} in the folder" if files else "an empty folder"
    structured = [*TEXT, *(JSON if path.suffix in (".json", ".jsonl") else CSV if path.suffix == ".csv" else [])]
    name, mutate = rng.choice(sorted((SUBTLE if subtle else {**ANY, **dict(structured)}).items()))
    mutate(rng, path)
    return f"{path.name}: {name}"


# --- bytes -----------------------------------------------------------------------------------------------------------


def _flip(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 16))):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _cut(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) + 1)])


def _insert(rng: random.Random, path: Path) -> None:
    data, noise = path.read_bytes(), rng.choice((b"\0", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n\n", rng.randbytes(32)))
    place = rng.randrange(len(data) + 1)
    path.write_bytes(data[:place] + noise + data[place:])


def _remove(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    place = rng.randrange(len(data) + 1)
    path.write_bytes(data[:place] + data[place + rng.randrange(1, 200) :])


def _other_kind(_: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def _loop(_: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _swap(rng: random.Random, path: Path) -> None:
    other = rng.choice(sorted(file for file in path.parent.iterdir() if file.is_file()))
    content = path.read_bytes()
    shutil.copyfile(other, path) if other != path else path.write_bytes(content * 2)


def _bit(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data) // 2, len(data))] ^= 1 << rng.randrange(8)  # behind the header of a binary file
    path.write_bytes(data)


def _digit(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    places = [place.start() for place in re.finditer(rb"[1-9]", data)]
    place = rng.choice(places)
    path.write_bytes(data[:place] + bytes([rng.choice(b"123456789")]) + data[place + 1 :])


SUBTLE: dict[str, Mutation] = {"one bit": _bit, "a digit": _digit}
ANY: dict[str, Mutation] = {
    "bits flipped": _flip,
    "cut": _cut,
    "bytes inserted": _insert,
    "bytes removed": _remove,
    "empty": lambda _, path: path.write_bytes(b""),
    "noise": lambda rng, path: path.write_bytes(rng.randbytes(rng.choice((1, 100, 10_000)))),
    "twice": lambda _, path: path.write_bytes(path.read_bytes() * 2),
    "a folder in its place": _other_kind,
    "a link to itself": _loop,
    "missing": lambda _, path: path.unlink(),
    "unreadable": lambda _, path: path.chmod(0),
    "another file in its place": _swap,
    "untouched": lambda _, path: None,
}

# --- text ------------------------------------------------------------------------------------------------------------


def _recode(encoding: str) -> Mutation:
    def recode(_: random.Random, path: Path) -> None:
        path.write_bytes(path.read_bytes().decode(errors="replace").encode(encoding, errors="replace"))

    return recode


def _lines(change: Callable[[random.Random, list[bytes]], list[bytes]]) -> Mutation:
    def mutate(rng: random.Random, path: Path) -> None:
        path.write_bytes(b"".join(change(rng, path.read_bytes().splitlines(keepends=True))))

    return mutate


TEXT: list[tuple[str, Mutation]] = [
    ("UTF-16", _recode("utf-16")),
    ("UTF-8 with BOM", _recode("utf-8-sig")),
    ("Latin-1", _recode("latin-1")),
    ("CRLF", _lines(lambda _, lines: [line.replace(b"\n", b"\r\n") for line in lines])),
    ("CR", _lines(lambda _, lines: [line.replace(b"\n", b"\r") for line in lines])),
    ("a line removed", _lines(lambda rng, lines: [line for line in lines if rng.random() > 0.2])),
    ("lines shuffled", _lines(lambda rng, lines: rng.sample(lines, len(lines)))),
    ("a line twice", _lines(lambda rng, lines: lines + lines[:1])),
    ("blank lines", _lines(lambda rng, lines: [b"\n", *lines, b"  \n", b"\n"])),
    ("one long line", _lines(lambda rng, lines: [b"x" * 300_000, *lines])),
]

# --- JSON and CSV ----------------------------------------------------------------------------------------------------


def _value(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    places = list(_VALUE.finditer(data))
    if places:
        place = rng.choice(places)
        path.write_bytes(data[: place.start()] + rng.choice(VALUES).encode() + data[place.end() :])


def _key_twice(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    keys = re.findall(rb'"(\w+)":', data) or [b"a"]
    path.write_bytes(data.replace(b"{", b'{"' + rng.choice(keys) + b'": ' + rng.choice(VALUES).encode() + b", ", 1))


def _rows(change: Callable[[random.Random, dict[str, Any]], Any]) -> Mutation:
    """Change one JSON object of the file."""

    def mutate(rng: random.Random, path: Path) -> None:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        place = rng.randrange(len(lines))
        row = parse_json(lines[place])  # an earlier mutation may have nested it too deeply: ValueError, skipped
        lines[place] = json.dumps(change(rng, row) if isinstance(row, dict) and row else [row])
        path.write_text("\n".join(lines) + "\n")

    return mutate


JSON: list[tuple[str, Mutation]] = [
    ("a value replaced", _value),
    ("another value replaced", _value),
    ("a third value replaced", _value),
    ("a key twice", _key_twice),
    ("a key removed", _rows(lambda rng, row: {key: row[key] for key in rng.sample(sorted(row), len(row) - 1)})),
    ("a key renamed", _rows(lambda rng, row: {f"{key}x": value for key, value in row.items()})),
    ("a list in place of an object", _rows(lambda rng, row: [row])),
]


def _cell(rng: random.Random, path: Path) -> None:
    rows = [line.split(",") for line in path.read_text().splitlines()]
    row = rng.choice(rows)
    row[rng.randrange(len(row))] = rng.choice(CELLS)
    path.write_text("\n".join(",".join(cells) for cells in rows) + "\n", newline="")


def _column_twice(_: random.Random, path: Path) -> None:
    path.write_text("\n".join(f"{line},{line.split(',')[0]}" for line in path.read_text().splitlines()) + "\n")


CSV: list[tuple[str, Mutation]] = [
    ("a cell replaced", _cell),
    ("another cell replaced", _cell),
    ("a column twice", _column_twice),
]
