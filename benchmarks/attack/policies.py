"""Area: policy files of a stranger, with a right digest and one hostile change.

Loading one touches no file, socket or process but those that were named, as an audit hook sees; what is wrong with it
is one line. Of some, a question is answered with models that are named.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load, load_file, save

from benchmarks.attack.damage import VALUES
from benchmarks.attack.harness import Outcome, run_cli
from query_mutator import Rewriter
from query_mutator.errors import BackendError, UsageError
from query_mutator.session.policy_file import POLICY_FILE, acting_settings, digest_of_content, load_policy, load_saved
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

Tensors = dict[str, NDArray[Any]]


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
    with watched(path) as acts:
        detail = _load(path)
    if acts or (folder / "ran").exists():
        return Outcome(case=case, verdict="wrong", detail=f"it did {acts}")
    if not detail and rng.random() < answered:
        detail = _answer(path)
    return Outcome(case=case, verdict="wrong" if detail else "ok", detail=detail)


@cache
def _warm_up(kind: str) -> None:
    """Import what loading imports, and write the byte code of it."""
    _take_steps(run_of(kind) / POLICY_FILE, ollama_url=(server_url(),))


def _load(path: Path) -> str:
    """Take every step of loading that makes no call; return what is wrong with how it ended."""
    try:
        _take_steps(path)
    except UsageError as error:
        return _wrong_line(str(error))
    return ""


def _take_steps(path: Path, **named: Any) -> None:
    saved = load_saved(path)
    load_policy(saved)
    acting_settings(saved.system, named, saved=saved)


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
    """Yield what the block does besides reading `allowed` and installed code."""
    _install_hook()
    acts: list[str] = []
    _watching.append((acts, {str(path) for path in allowed}))
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


def parts_of(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Return the JSON and the tensors of a policy file."""
    with safe_open(path, framework="numpy") as file:
        return json.loads(file.metadata()["policy"][64:]), load_file(path)


def packed(about: Mapping[str, Any] | str, tensors: Tensors | bytes) -> bytes:
    """Return a policy file of JSON and tensors, or of a safetensors file, with the right digest if it can be read."""
    text = about if isinstance(about, str) else json.dumps(about)
    file = tensors if isinstance(tensors, bytes) else save(tensors)
    try:
        arrays = load(file)
    except Exception:  # a header that lies
        arrays = {}
    about_file = json.dumps({"policy": digest_of_content(text, arrays) + text}).encode()
    size = int.from_bytes(file[:8], "little")
    head = b'{"__metadata__":' + about_file + b"," + file[9 : 8 + size]
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + file[8 + size :]


def with_settings(path: Path, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a policy file whose JSON was changed."""
    about, tensors = parts_of(path)
    change(about)
    return packed(about, tensors)


# --- changes: each returns the file and what was done -----------------------------------------------------------------


def change(rng: random.Random, kind: str, how: str, path: Path) -> str:
    """Write the policy of a run with one change to `path`; return what was changed."""
    data, what = CHANGES[how](rng, run_of(kind) / POLICY_FILE, path.parent)
    path.write_bytes(data)
    return what


def _value(rng: random.Random, own: Path, _: Path) -> tuple[bytes, str]:
    """Put another JSON value in the place of one."""
    about, tensors = parts_of(own)
    node, names = about, []
    while isinstance(node, (dict, list)) and node and (not names or rng.random() < 0.8):
        parent, key = node, rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        node = parent[key]
        names.append(str(key))
    parent[key] = "SENTINEL"
    value = rng.choice(VALUES)
    text = json.dumps(about).replace('"SENTINEL"', value)
    return packed(text, tensors), f"{'.'.join(names)} = {value[:60]}"


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
        ("trained_with", {"openai_url": [ELSEWHERE], "nonsense": [secret]}),
        ("task", {"judge_rubric": secret, "judge_model": "m", "reward": "judge=1"}),
        ("plugins", {evil: ""}),
        ("plugins", {evil: hashlib.sha256(Path(evil).read_bytes()).hexdigest()}),
        ("plugins", {"antigravity": ""}),
    ]
    place, values = rng.choice(places)
    return with_settings(own, lambda about: about[place].update(values)), f"{place} {values}"


def _array(rng: random.Random, own: Path, _: Path) -> tuple[bytes, str]:
    """Put another array in the place of one."""
    about, tensors = parts_of(own)
    name = rng.choice(sorted(tensors))
    old = tensors[name]
    arrays: Mapping[str, Callable[[], NDArray[Any]]] = {
        "transposed": lambda: np.ascontiguousarray(old.T),
        "a row less": lambda: old[:-1] if old.ndim else old,
        "one dimension more": lambda: old[None],
        "empty": lambda: np.empty(0, old.dtype),
        "not finite": lambda: np.full(old.shape, np.nan),
        "complex": lambda: np.zeros(old.shape, np.complex64),
        "of whole numbers": lambda: np.full(old.shape, rng.choice((-1, 10**9)), np.int64),
        "of truth values": lambda: np.zeros(old.shape, bool),
    }
    how = rng.choice(sorted(arrays))
    return packed(about, {**tensors, name: np.asarray(arrays[how](), order="C")}), f"{name} {how}"


def _entries(rng: random.Random, own: Path, _: Path) -> tuple[bytes, str]:
    """Add a tensor, or many, leave one out, or let the header lie about one."""
    about, tensors = parts_of(own)
    name = rng.choice(sorted(tensors))
    added = rng.choice(("../../evil", "/tmp/evil", "more", "weights/x.py", "weights/a b", "__metadata__"))
    file = save(tensors)
    head, data = file[8 : 8 + int.from_bytes(file[:8], "little")], file[8 + int.from_bytes(file[:8], "little") :]
    lies = (
        (rb'"shape":\[', b'"shape":[9999999999,'),
        (rb'"data_offsets":\[', b'"data_offsets":[1'),
        (rb"F32", b"F8_E4M3"),
    )
    lie = rng.choice(lies)
    changed: Mapping[str, Callable[[], Tensors | bytes]] = {
        f"with {added}": lambda: {**tensors, added: np.zeros(3)},
        f"without {name}": lambda: {one: tensors[one] for one in tensors if one != name},
        "with many": lambda: {**tensors, **{f"weights/{at}": np.zeros(0) for at in range(3000)}},
        f"with {lie[1]!r}": lambda: file[:8] + re.sub(*lie, head, count=1) + data,
        "with a tensor twice": lambda: file[:8] + head.rstrip()[:-1] + b"," + head.strip()[1:] + data,
    }
    how = rng.choice(sorted(changed))
    found = changed[how]()
    if isinstance(found, bytes):
        found = (len(found) - 8 - len(data)).to_bytes(8, "little") + found[8:]
    return packed(about, found), how


def _bytes(rng: random.Random, own: Path, _: Path) -> tuple[bytes, str]:
    """Flip bits of the file, or cut it; its digest is right if it can still be read."""
    data = bytearray(own.read_bytes())
    places = [rng.randrange(len(data)) for _ in range(rng.choice((1, 4, 40)))]
    for at in places:
        data[at] ^= 1 << rng.randrange(8)
    cut = rng.choice((len(data), len(data), rng.randrange(len(data))))
    file = bytes(data[:cut])
    with suppress(Exception):  # most cannot
        tensors, head = load(file), json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
        file = packed(head["__metadata__"]["policy"][64:], tensors)
    return file, f"at {places[:9]}, cut at {cut}"


CHANGES: Mapping[str, Callable[[random.Random, Path, Path], tuple[bytes, str]]] = {
    "value": _value,
    "reach": _reach,
    "array": _array,
    "entries": _entries,
    "bytes": _bytes,
}
