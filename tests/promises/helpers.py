"""What the tests of promises share: commands run as a user runs them, a model server, and the files of a run."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.promises.model_server import SHELF

ROOT = Path(__file__).resolve().parents[2]
TRAIN = (str(ROOT / "train_query_mutator.py"),)
QM = ("-m", "query_mutator")
_ZYGOTE = "TESTS_PROMISES_ZYGOTE"

Words = Iterable[str | Path]


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a user whose home is a folder of the test."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("QUERY_MUTATOR_", "OLLAMA_", "OPENAI_"))}
    mark = {k: v for k, v in os.environ.items() if k == "QUERY_MUTATOR_TESTS"}  # ends children with the session
    places = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "XDG_CONFIG_HOME": str(home / ".config")}
    return {**kept, **mark, **places, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "120", **more}


class Command:
    """A command that runs, as `python ARGV` in a folder which is also the user's home."""

    def __init__(self, argv: Words, *, cwd: Path, env: Mapping[str, str] | None = None, limit_bytes: int = 0) -> None:
        folder = Path(tempfile.mkdtemp(dir=zygote().parent))
        self.argv, self._stdout, self._stderr = list(map(str, argv)), folder / "stdout", folder / "stderr"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(zygote()))
        self._replies = self._socket.makefile("rw", encoding="utf-8")
        request = {
            "argv": self.argv,
            "cwd": str(cwd),
            "env": environment(cwd, **(env or {})),
            "limit_bytes": limit_bytes,
            "stdout": str(self._stdout),
            "stderr": str(self._stderr),
        }
        print(json.dumps(request), file=self._replies, flush=True)
        self.pid = int(self._replies.readline())
        self.returncode: int | None = None

    def poll(self, timeout_s: float = 0) -> int | None:
        """Return the exit code, None while the command runs; wait as long as `timeout_s` for its end."""
        if self.returncode is None and select.select([self._socket], [], [], timeout_s)[0]:
            self.returncode = int(self._replies.readline())
            self._replies.close()
            self._socket.close()
        return self.returncode

    def wait(self, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Wait for the end; after `timeout_s` the command is killed, and TimeoutError."""
        if self.poll(timeout_s) is None:
            self.kill()
            raise TimeoutError(f"{self.argv} still runs after {timeout_s} s\n{self.stdout}\n{self.stderr}")
        assert self.returncode is not None
        return subprocess.CompletedProcess(self.argv, self.returncode, self.stdout, self.stderr)

    def wait_for(self, moment: Callable[[], bool], *, timeout_s: float = 60) -> bool:
        """Wait until `moment()` is true; False when the command ended before."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if moment():
                return True
            if self.poll(0.002) is not None:
                return False
        raise TimeoutError(f"{self.argv}\n{self.stdout}\n{self.stderr}")

    def wait_for_line(self, start: str, *, timeout_s: float = 60) -> str:
        """Wait for a line on stdout that starts so, as "listening on "; return it."""
        found: list[str] = []

        def moment() -> bool:
            found[:] = [line for line in self.stdout.splitlines(keepends=True) if line.startswith(start)]
            return bool(found and found[0].endswith("\n"))

        assert self.wait_for(moment, timeout_s=timeout_s), f"{self.argv}\n{self.stdout}\n{self.stderr}"
        return found[0].strip()

    def signal(self, number: int) -> None:
        """Send a signal, if the command still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """`kill -9`, and wait."""
        self.signal(signal.SIGKILL)
        self.poll(20)

    @property
    def stdout(self) -> str:
        """What it wrote to stdout so far."""
        return self._stdout.read_text(encoding="utf-8") if self._stdout.exists() else ""

    @property
    def stderr(self) -> str:
        """What it wrote to stderr so far."""
        return self._stderr.read_text(encoding="utf-8") if self._stderr.exists() else ""


@functools.cache
def zygote() -> Path:
    """Start zygote.py once for this process and those that it starts; return its socket."""
    if named := os.environ.get(_ZYGOTE):
        return Path(named)
    folder = Path(tempfile.mkdtemp(prefix="promises-"))
    path, script = folder / "socket", Path(__file__).with_name("zygote.py")
    process = subprocess.Popen([sys.executable, "-B", str(script), str(path)], cwd=folder, env=environment(folder))

    def end() -> None:
        process.kill()
        process.wait(20)
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.01)  # bound, and now listening
    os.environ[_ZYGOTE] = str(path)
    return path


def run(argv: Words, *, cwd: Path, timeout_s: float = 120, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run `python ARGV` to its end; `env=` adds variables, `limit_bytes=` is the longest file the kernel allows."""
    return Command(argv, cwd=cwd, **settings).wait(timeout_s)


def good(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Return the result of a command that must have ended with exit code 0."""
    assert result.returncode == 0, f"{result.args}\n{result.stdout}\n{result.stderr}"
    return result


def one_line_error(result: subprocess.CompletedProcess[str], *, code: int = 2) -> str:
    """Return the one line on stderr of a command that must have ended with `code`, without a traceback."""
    said = f"{result.args}\n{result.stdout}\n{result.stderr}"
    assert result.returncode == code, said
    assert "Traceback" not in result.stdout + result.stderr, said
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, said
    return lines[0]


# ---------------------------------------------------------------- the model server


@dataclass(kw_only=True)
class ModelServer:
    """A model server of its own process; `kill` and `start` keep its port, the counts are those of the process."""

    settings: dict[str, Any]
    url: str = ""
    knobs_url: str = field(default="", repr=False)
    process: Command | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start it; return when it listens."""
        script = Path(__file__).with_name("model_server.py")
        self.process = Command([script, json.dumps(self.settings)], cwd=script.parent)
        words = self.process.wait_for_line("listening on ").split()
        self.url, self.knobs_url = words[2], words[4]
        self.settings["port"] = int(self.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        """Kill it, as a machine does that loses power."""
        if self.process is not None:
            self.process.kill()

    def stats(self) -> dict[str, Any]:
        """Return its counters of calls, with the number `in_flight`; docs/how-to/test-server.md."""
        found: dict[str, Any] = ask(f"{self.url}/debug/stats")
        found["routes"].pop("/debug/stats", None)
        return {**found, "in_flight": found["waiting"] + found["in_service"] + found["pending_loads"]}

    @property
    def total(self) -> int:
        """Return how many calls began."""
        found = self.stats()
        return int(found["calls"] + found["in_flight"] + found["cancelled"])

    def reset(self) -> None:
        """Set its counters to 0, and forget prompts and keys."""
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/debug/stats", method="DELETE")):
            self.set(forget=True)

    def set(self, **knobs: Any) -> dict[str, Any]:
        """Change knobs of the running server, as `latency_ms=50`; return the `prompts` and `keys` it saw."""
        body = {"model": "knobs", "prompt": json.dumps(knobs), "stream": False}
        found: dict[str, Any] = json.loads(ask(f"{self.knobs_url}/api/generate", body)["response"])
        return found

    @property
    def prompts(self) -> list[tuple[str, str]]:
        """Return model and prompt of each call, in order."""
        return [(model, prompt) for model, prompt in self.set()["prompts"]]

    @property
    def keys(self) -> list[str]:
        """Return the different Authorization headers that came; only a server with `api_key` keeps them."""
        return list(self.set()["keys"])


@contextlib.contextmanager
def model_server(**settings: Any) -> Iterator[ModelServer]:
    """Start a model server with settings of model_server.py, as `latency_ms=5`, until the block ends."""
    server = ModelServer(settings=settings)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def ask(url: str, body: Any = None, *, timeout_s: float = 30, headers: Mapping[str, str] | None = None) -> Any:
    """Return the JSON of a GET, or of a POST with a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        return json.load(reply)


# ---------------------------------------------------------------- questions, flags, runs


def questions() -> list[dict[str, Any]]:
    """Return a question about each word that `librarian` knows; two in three have noise that `softener` drops."""
    noise = ("plz tell me the {} umm", "which {} is it", "umm what {} lol")
    rows = enumerate(SHELF.items())
    return [{"id": f"q{n}", "query": noise[n % 3].format(word), "accept": [name]} for n, (word, name) in rows]


def write_questions(path: Path, rows: Iterable[Mapping[str, Any]] | None = None) -> Path:
    """Write questions (by default those of `questions`) as JSON lines; return the path."""
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in (questions() if rows is None else rows)), encoding="utf-8"
    )
    return path


def server_flags(*servers: ModelServer) -> list[str]:
    """Return flags of a command that asks the models of these servers."""
    urls = [server.url for server in servers]
    return ["--ollama-url", *urls, "--target-model", "librarian", "--mutator-model", "softener", "--encoder", "hash"]


def train_flags(server: ModelServer, folder: Path, *, algo: str = "ppo", steps: int = 64) -> list[str]:
    """Return flags of a training that takes seconds: 4 environments, no evaluation, questions of `questions`."""
    return [
        *server_flags(server),
        *("--dataset", str(write_questions(folder / "questions.jsonl")), "--save-dir", str(folder / "runs")),
        *("--algo", algo, "--operators", "spelling,neutral,filler", "--forms", "none", "--ask", "every_step"),
        *("--answer", "best", "--reward", "right=1", "--max-episode-steps", "3", "--embedding-dims", "4"),
        *("--num-processes", "4", "--num-steps", "8", "--num-env-steps", str(steps), "--batch-size", "4"),
        *("--num-mini-batch", "2", "--save-interval", "1", "--eval-interval", "0", "--no-evaluate", "--cache", "off"),
    ]


def resume(server: ModelServer, run_folder: Path) -> list[str]:
    """Return the flags that continue a training: a run names no server to ask."""
    return ["--resume", str(run_folder), "--ollama-url", server.url]


def train(server: ModelServer, folder: Path, *more: str, **settings: Any) -> Path:
    """Train with `train_flags` and more flags (the last one of a name counts); return the run folder."""
    good(run([*TRAIN, *train_flags(server, folder, **settings), *more], cwd=folder))
    return latest(folder)


def latest(folder: Path) -> Path:
    """Return the run folder of the latest training."""
    return (folder / "runs" / "latest").resolve()


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def transcript(run_folder: Path) -> list[dict[str, Any]]:
    """Return a run's steps by environment and step, without what depends on the clock."""
    clock = ("timing", "crc")
    rows = [{k: v for k, v in row.items() if k not in clock} for row in rows_of(run_folder / "transcripts.jsonl")]
    return sorted(rows, key=lambda row: (row["env"], row["step"]))


def weights(run_folder: Path) -> dict[str, bytes]:
    """Return the arrays of a run's policy file, a safetensors file of them with JSON in its metadata."""
    found = {name: array.tobytes() for name, array in load_file(run_folder / "policy.qm").items()}
    assert found
    return found


def summary(run_folder: Path) -> dict[str, Any]:
    """Return a run's summary.json."""
    found: dict[str, Any] = json.loads((run_folder / "summary.json").read_text(encoding="utf-8"))
    return found


def last_metrics(run_folder: Path) -> dict[str, Any]:
    """Return the last row of a run's metrics.jsonl."""
    return rows_of(run_folder / "metrics.jsonl")[-1]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
