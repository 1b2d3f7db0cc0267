"""Apply each one-line break of breaks/*.toml in a copy of the tree and see its test turn red.

    python tests/promises/breaks.py              # all
    python tests/promises/breaks.py kill batch   # those with one of these words in the test's name

Prints "red" for each test that caught its break; "GREEN" and "STALE" (the line is not there any more) are exit code 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def copy_tree(folder: Path) -> None:
    """Copy what git tracks or would track."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def verdict(row: dict[str, str], tree: Path) -> str:
    """Return "red", "GREEN" or "STALE" for one break."""
    file = tree / row["file"]
    whole = file.read_text(encoding="utf-8")
    if whole.count(row["old"]) != 1:
        return "STALE"
    file.write_text(whole.replace(row["old"], row["new"]), encoding="utf-8")
    try:
        words = [sys.executable, "-B", "-m", "pytest", "-x", "-p", "no:cacheprovider", f"tests/promises/{row['test']}"]
        env = {**os.environ, "PYTHONPATH": str(tree)}
        code = subprocess.run(words, cwd=tree, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
    finally:
        file.write_text(whole, encoding="utf-8")
    return {0: "GREEN", 1: "red"}.get(code, f"pytest ended with {code}")


def main(words: list[str]) -> int:
    """Try the breaks whose tests have one of the words in their names."""
    files = sorted((HERE / "breaks").glob("*.toml"))
    rows = [row for file in files for row in tomllib.loads(file.read_text(encoding="utf-8"))["break"]]
    chosen = [row for row in rows if not words or any(word in row["test"] for word in words)]
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for row in chosen:
            found = verdict(row, Path(folder))
            bad += found != "red"
            print(f"{found:6} {row['test']}: {row['promise']}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
