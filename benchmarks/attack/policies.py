"""Area: policy files of a stranger, archives with a right digest and one hostile change.

Loading one touches no file, socket or process but those that were named, as an audit hook sees; what is wrong with it
is one line. Of some, a question is answered with models that are named.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attack.damage import VALUES
from benchmarks.attack.harness import Outcome, run_cli
from query_mutator import Rewriter
from query_mutator.errors import BackendError, UsageError
from query_mutator.session.loading import acting_settings, load_policy, load_saved, training_split
from query_mutator.session.policy_file import POLICY_FILE
from query_mutator.session.trust import trusted_path
from query_mutator.testing import start_server
from tests.conftest import Librarian, Softener
from tests.integration.conftest import ROWS, write_dataset
from train_query_mutator import main as train

LEARNER = ["--train-batch-size", "8", "--learning-starts", "8"]
KINDS = {"ppo": ["--deterministic"], "iqn": LEARNER, "direct": LEARNER}
ANSWERED_SHARE = 0.1  # of the cases: a question takes fifty times as long as loading
LONGEST_LINE = 2000
ROOT = Path(__file__).resolve().parents[2]
#: Nothing listens there, and nothing may ask.
ELSEWHERE = "http://127.0.0.1:9/v1"

Entries = list[tuple[str, bytes, int]]  # name, content, compression


def attack(rng: random.Random, folder: Path, *, answered: float = ANSWERED_SHARE) -> Outcome:
    """Write a hostile policy file, load it, and perhaps answer a question by it."""
    kind = rng.choice([*KINDS])
    path = folder / "policy.qm"
    secret, evil = folder / "secret.jsonl", folder / "evil.py"
    secret.write_text('{"query": "a secret", "answer": "x"}\n')
    evil.write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    how = rng.choice(sorted(CHANGES))
    what = change(rng, kind, how, path)
    case = f"{kind}: {how} {what[:200]}"
    _warm_up(kind)
    with watched(path, run_of(kind).parent / "questions.jsonl") as acts:
        detail = _load(path)
    if acts or (folder / "ran").exists():
        return Outcome(case=case, verdict="wrong", detail=f"it did {acts}")
    if not detail and rng.random() < answered:
        detail = _answer(path)
    return Outcome(case=case, verdict="wrong" if detail else "ok", detail=detail)


@cache
def _warm_up(kind: str) -> None:
    """Import what loading imports, and write the byte code of it."""
    _take_steps(run_of(kind) / POLICY_FILE)


def _load(path: Path) -> str:
    """Take every step of loading that makes no call; return what is wrong with how it ended."""
    try:
        _take_steps(path)
    except UsageError as error:
        return _wrong_line(str(error))
    return ""


def _take_steps(path: Path) -> None:
    saved = load_saved(path)
    load_policy(saved.checkpoint)
    acting_settings(saved.checkpoint.system, {}, source=path)
    training_split(saved)


def _answer(path: Path) -> str:
    named = {"ollama_url": server_url(), "target_model": "librarian", "mutator_model": "softener", "encoder": "hash"}
    try:
        with Rewriter.load(path, **named, max_retries=0, timeout_s=5.0, batch_size=2) as rewriter:
            rewriter.rewrite("plz sort my list", max_calls=4, deadline_s=5.0)
    except (UsageError, BackendError) as error:
        return _wrong_line(str(error))
    return ""


def _wrong_line(text: str) -> str:
    return "" if "\n" not in text and len(text) < LONGEST_LINE else f"not one short line: {text[:500]}"


@cache
def server_url() -> str:
    """Return the address of a server in this process, which runs until the process ends."""
    server = start_server([Librarian(), Softener()], num_parallel=8)
    atexit.register(server.close)
    return server.url


@cache
def run_of(kind: str) -> Path:
    """Return a run of two updates."""
    folder = Path(tempfile.mkdtemp(prefix=f"run-{kind}-"))
    os.environ.setdefault("QUERY_MUTATOR_TRUSTED", str(folder / "trusted.jsonl"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    flags = ["--ollama-url", server_url(), "--target-model", "librarian", "--mutator-model", "softener"]
    flags += ["--forms", "none", "--ask", "every_step", "--max-episode-steps", "5"]
    flags += ["--encoder", "hash", "--dataset", str(write_dataset(folder / "questions.jsonl", ROWS))]
    flags += ["--embedding-dims", "4", "--operators", "spelling,neutral,filler", "--save-dir", str(folder)]
    flags += ["--num-processes", "2", "--num-steps", "4", "--num-mini-batch", "2", "--num-env-steps", "16"]
    flags += ["--hidden-sizes", "8", "--cache", "off", "--no-evaluate", "--eval-interval", "0", "--algo", kind]
    ended = run_cli(train, [*flags, *KINDS[kind]], folder)
    assert ended.code == 0, ended
    return (folder / "latest").resolve()


# --- what loading does -----------------------------------------------------------------------------------------------

_ACTS = {
    "os.exec", "os.fork", "os.forkpty", "os.link", "os.mkdir", "os.posix_spawn", "os.remove", "os.rename", "os.rmdir",
    "os.spawn", "os.symlink", "os.system", "os.truncate", "pickle.find_class", "socket.__new__", "socket.bind",
    "socket.connect", "socket.getaddrinfo", "subprocess.Popen",
}  # fmt: skip
_watching: list[tuple[list[str], set[str]]] = []


@contextmanager
def watched(*allowed: Path) -> Iterator[list[str]]:
    """Yield what the block does besides reading `allowed`, the user's file of trust and installed code."""
    _install_hook()
    acts: list[str] = []
    _watching.append((acts, {str(path) for path in (*allowed, trusted_path())}))
    try:
        yield acts
    finally:
        _watching.pop()


@cache
def _install_hook() -> None:
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watching:
        return
    acts, allowed = _watching[-1]
    if event == "open" and isinstance(args[0], (str, bytes)):
        name = args[0] if isinstance(args[0], str) else args[0].decode(errors="replace")
        if name not in allowed and not (_is_installed(name) and args[1] in (None, "r", "rb")):
            acts.append(f"open {name} {args[1]}")
    elif event == "exec" and not _is_installed(file := args[0].co_filename) and not file.startswith("<"):
        acts.append(f"exec {file}")
    elif event in _ACTS:
        acts.append(f"{event} {args}"[:300])


def _is_installed(name: str) -> bool:
    return name.startswith((sys.prefix, sys.base_prefix, str(ROOT)))


# --- the file --------------------------------------------------------------------------------------------------------


def archive(entries: Sequence[tuple[str, bytes, int]]) -> bytes:
    """Return a policy file of entries, with the right digest."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two entries of one name
        for name, data, compression in entries:
            file.writestr(zipfile.ZipInfo(name), data, compress_type=compression)
        file.comment = b" " * 71
    return signed(content.getvalue()[:-71])


def signed(data: bytes) -> bytes:
    """Return the bytes of an archive with their digest as its comment."""
    return data + b"sha256 " + hashlib.sha256(data).hexdigest().encode()


def entries_of(path: Path) -> Entries:
    """Return the entries of a policy file."""
    with zipfile.ZipFile(path) as file:
        return [(name, file.read(name), zipfile.ZIP_STORED) for name in file.namelist()]


def with_settings(path: Path, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a policy file whose policy.json was changed."""
    entries = entries_of(path)
    about = json.loads(entries[0][1])
    change(about)
    return archive([("policy.json", json.dumps(about).encode(), zipfile.ZIP_STORED), *entries[1:]])


# --- changes: each returns the file and what was done -----------------------------------------------------------------


def change(rng: random.Random, kind: str, how: str, path: Path) -> str:
    """Write the policy of a run with one change to `path`; return what was changed."""
    data, what = CHANGES[how](rng, run_of(kind) / POLICY_FILE, path.parent)
    path.write_bytes(data)
    return what


def _value(rng: random.Random, own: Path, _: Path) -> tuple[bytes, str]:
    """Put another JSON value in the place of one."""
    entries = entries_of(own)
    about = json.loads(entries[0][1])
    node, names = about, []
    while isinstance(node, (dict, list)) and node and (not names or rng.random() < 0.8):
        parent, key = node, rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        node = parent[key]
        names.append(str(key))
    parent[key] = "SENTINEL"
    value = rng.choice(VALUES)
    text = json.dumps(about).replace('"SENTINEL"', value).encode("utf-8", "surrogatepass")
    return archive([("policy.json", text, zipfile.ZIP_STORED), *entries[1:]]), f"{'.'.join(names)} = {value[:60]}"


def _reach(rng: random.Random, own: Path, folder: Path) -> tuple[bytes, str]:
    """Name a server, a file or a plugin."""
    secret, evil = str(folder / "secret.jsonl"), str(folder / "evil.py")
    places: list[tuple[str, dict[str, Any]]] = [
        ("system", {"backend": "openai", "openai_url": ELSEWHERE, "ollama_url": []}),
        ("system", {"ollama_url": [ELSEWHERE]}),
        ("system", {"backend": "llama", "gguf": [secret], "ollama_url": []}),
        ("system", {"encoder": str(folder)}),
        ("system", {"encoder": "stranger/encoder"}),
        ("system", {"cache": "all", "cache_path": str(folder / "cache.sqlite")}),
        ("task", {"dataset": secret}),
        ("task", {"dataset": "hf:stranger/questions"}),
        ("task", {"judge_rubric": secret, "judge_model": "m", "reward": "judge=1"}),
        ("background", {"dataset": secret}),
        ("plugins", {evil: ""}),
        ("plugins", {evil: hashlib.sha256(Path(evil).read_bytes()).hexdigest()}),
        ("plugins", {"antigravity": ""}),
    ]
    place, values = rng.choice(places)
    return with_settings(own, lambda about: about[place].update(values)), f"{place} {values}"


def _array(rng: random.Random, own: Path, _: Path) -> tuple[bytes, str]:
    """Put another array in the place of one."""
    entries = entries_of(own)
    at = rng.randrange(1, len(entries))
    name, content, _compression = entries[at]
    old = np.load(io.BytesIO(content))
    arrays: Mapping[str, Callable[[], bytes]] = {
        "transposed": lambda: _npy(np.ascontiguousarray(old.T)),
        "a row less": lambda: _npy(old[:-1] if old.ndim else old),
        "one dimension more": lambda: _npy(old[None]),
        "empty": lambda: _npy(np.empty(0, old.dtype)),
        "not finite": lambda: _npy(np.full(old.shape, np.nan)),
        "of objects": lambda: _npy(np.array([{"a": 1}], dtype=object)),
        "of texts": lambda: _npy(np.array(["a" * 50])),
        "complex": lambda: _npy(np.zeros(old.shape, complex)),
        "of whole numbers": lambda: _npy(np.full(old.shape, rng.choice((-1, 10**9)), np.int64)),
        "of a header that lies": lambda: content.replace(b"(", b"(99999999, ", 1),
        "no array": lambda: rng.randbytes(rng.randrange(200)),
        "cut": lambda: content[: rng.randrange(len(content))],
    }
    how = rng.choice(sorted(arrays))
    entries[at] = (name, arrays[how](), zipfile.ZIP_STORED)
    return archive(entries), f"{name} {how}"


def _npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=True)
    return stream.getvalue()


def _entries(rng: random.Random, own: Path, _: Path) -> tuple[bytes, str]:
    """Add, repeat, compress or leave out an entry."""
    entries = entries_of(own)
    name, content, _compression = rng.choice(entries)
    added = rng.choice(("../../evil.npy", "/tmp/evil.npy", "more.npy", "weights/x.py", "weights/a b.npy", name))
    changed: Mapping[str, Callable[[], Entries]] = {
        f"with {added}": lambda: [*entries, (added, content, zipfile.ZIP_STORED)],
        f"without {name}": lambda: [entry for entry in entries if entry[0] != name],
        f"with {name} compressed": lambda: [
            (one, data, zipfile.ZIP_DEFLATED * (one == name)) for one, data, _ in entries
        ],
        "with a bomb": lambda: [*entries, ("weights/bomb.npy", _npy(np.zeros(5_000_000)), zipfile.ZIP_DEFLATED)],
        "with many": lambda: [*entries, *((f"weights/{at}.npy", b"", zipfile.ZIP_STORED) for at in range(3000))],
    }
    how = rng.choice(sorted(changed))
    return archive(changed[how]()), how


def _bytes(rng: random.Random, own: Path, _: Path) -> tuple[bytes, str]:
    """Flip bits of the archive's own structure, or cut it; its digest is right."""
    data = bytearray(own.read_bytes()[:-71])
    places = [rng.randrange(len(data)) for _ in range(rng.choice((1, 4, 40)))]
    for at in places:
        data[at] ^= 1 << rng.randrange(8)
    cut = rng.choice((len(data), len(data), rng.randrange(len(data))))
    return signed(bytes(data[:cut])), f"at {places[:9]}, cut at {cut}, crc {zlib.crc32(data):x}"


CHANGES: Mapping[str, Callable[[random.Random, Path, Path], tuple[bytes, str]]] = {
    "value": _value,
    "reach": _reach,
    "array": _array,
    "entries": _entries,
    "bytes": _bytes,
}
