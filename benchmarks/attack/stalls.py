"""What other clients of the proxy feel of an attack: `python -m benchmarks.attack.stalls`.

While each attack runs, another client asks `qm serve` for /healthz, each time on a new connection. It must be answered
within 0.2 s (median) and 1 s (worst), and the proxy's memory must stay under 400 MB. Proxy, upstream and attackers are
processes of their own; "of CPU" is the longest time that the proxy itself ran while the other client waited, which does
not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.attack.harness import run_qm
from benchmarks.attack.hostile import MODEL, HostileServer
from benchmarks.attack.proxy import STREAMS
from tests.integration.conftest import ROWS, write_dataset

MEDIAN_S, WORST_S, MEMORY_BYTES = 0.2, 1.0, 400_000_000
PAUSE_S = 0.02  # between two questions of the other client
RECOVERY_S = 5.5  # after an attack, in which refused connections end
KEY = "a-key-of-the-benchmark"
SPAWN = multiprocessing.get_context("spawn")

Attack = Callable[[int], Iterator[bytes]]


def _post(path: str, body: bytes, *, length: int | None = None, key: str = KEY) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}"]
    lines += [f"Content-Length: {len(body) if length is None else length}", "", ""]
    return "\r\n".join(lines).encode() + body


def _flood(first: bytes, piece: bytes, count: int) -> Attack:
    def send(_: int) -> Iterator[bytes]:
        yield first
        for _ in range(count):
            yield piece

    return send


def _ask(question: str, *, model: str = MODEL + "+qm", stream: bool = True) -> Attack:
    """Return a chat request whose content the upstream takes as the name of what it is to send."""
    turns = [{"role": "user", "content": question}]
    return _once(_post("/api/chat", json.dumps({"model": model, "stream": stream, "messages": turns}).encode()))


def _late(make: Callable[[], bytes]) -> Attack:
    """Return an attack that sends large bytes, made in the process that attacks."""
    made = functools.cache(make)
    return lambda _: iter([made()])


def _once(sent: bytes) -> Attack:
    return lambda _: iter([sent])


MB = 1_000_000
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
PICTURE = b'{"model":"m:latest+qm","images":["%b"]}'
OPEN = b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n"
#: Name -> connections at once, whether they stay open after they have sent all, and what each sends.
ATTACKS: dict[str, tuple[int, bool, Attack]] = {
    "nothing": (0, False, _once(b"")),
    "header of 80 MB": (4, False, _flood(GET + b"X: ", b"x" * MB, 80)),
    "URL of 40 MB": (4, False, _flood(b"GET /", b"x" * MB, 40)),
    "3 million headers": (4, False, _flood(GET, b"X: 1\r\n" * 100_000, 30)),
    "empty lines": (4, False, _flood(b"", b"\r\n" * 100_000, 30)),
    "1,003 half heads": (1003, True, _once(GET)),
    "1,003 half bodies": (1003, True, _once(_post("/api/chat", b'{"model":', length=100))),
    "1,003 half bodies, no key": (1003, True, _once(_post("/api/chat", b'{"model":', length=100, key="wrong"))),
    "1,003 half uploads": (1003, True, _once(_post("/api/blobs/sha256:0", b"x", length=100))),
    "8 half bodies of 60 MB": (8, True, _flood(_post("/api/chat", b"", length=63 * MB), b"x" * MB, 60)),
    "200 half bodies of 1 MB": (200, True, _once(_post("/api/chat", b"x" * 900_000, length=MB))),
    "body of 63 MB of {},": (2, False, _late(lambda: _post("/api/chat", b"[" + b"{}," * 21 * MB + b"{}]"))),
    "bodies of 1 MB of {},": (
        4,
        False,
        _once(_post("/api/chat", b'{"model":"m+qm","x":[' + b"{}," * 300_000 + b"1]}")),
    ),
    "bodies of 100,000 values": (
        4,
        False,
        _once(_post("/api/chat", b'{"model":"m+qm","x":[' + b"{}," * 49_000 + b"1]}")),
    ),
    "bodies of names": (4, False, _once(_post("/api/chat", b'{"model":{' + b'"model":"m",' * 80_000 + b'"x":1}}'))),
    "pictures of 60 MB": (4, False, _late(lambda: _post("/api/chat", PICTURE % (b"A" * 60 * MB)))),
    "chunks of a byte": (2, False, _flood(OPEN + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 50_000, 60)),
    "pipelined requests": (
        4,
        False,
        _flood(b"", (GET + b"Authorization: Bearer " + KEY.encode() + b"\r\n\r\n") * 3_000, 30),
    ),
    "pipelined, no key": (4, False, _flood(b"", b"GET / HTTP/1.1\r\n\r\n" * 30_000, 30)),
    "replies nobody reads": (100, True, _ask("lines of a MB", model=MODEL)),
    **{name: (4, False, _ask(name)) for name in STREAMS},
    "a line of 150 MB": (2, False, _ask("a line of 150 MB")),
    "a line of 150 MB, plain": (2, False, _ask("a line of 150 MB", model=MODEL)),
    "reply of 15 MB of {},": (4, False, _ask("reply of values", stream=False)),
    "reply of 15 MB of text": (4, False, _ask("reply of text", stream=False)),
}


# --- the other side ---------------------------------------------------------------------------------------------------


def _upstream(pipe: Any) -> None:
    """Serve in this process: a question that names a stream gets that, others an honest answer."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"

    def behave(ask: Any) -> Any:
        if ask.prompt == "a line of 150 MB":
            return [head % (150 * MB), *[b"x" * MB] * 150]
        if ask.prompt in ("reply of values", "reply of text"):
            first, piece, last = b'{"model":"m","x":[', b"{}," * 100_000, b"1]}"
            if ask.prompt == "reply of text":
                first, piece, last = b'{"model":"m","message":{"content":"', b"word " * 60_000, b'"}}'
            return [head % (len(first) + 50 * len(piece) + len(last)), first, *[piece] * 50, last]
        return STREAMS[ask.prompt](ask) if ask.prompt in STREAMS else [ask.honest()]

    server = HostileServer(behave, rng=random.Random(0))
    pipe.send(server.url)
    pipe.recv()


def _attack(port: int, name: str, started: Any, stopping: Any) -> None:
    """Attack from this process until told to stop."""
    connections, stays, send = ATTACKS[name]
    threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=_keep_sending, args=(port, send, stays, stopping)) for _ in range(connections)]
    if connections:
        next(send(0))  # large bytes are made here
    for thread in threads:
        thread.start()
    started.set()
    for thread in threads:
        thread.join()


def _keep_sending(port: int, send: Attack, stays: bool, stopping: Any) -> None:
    while not stopping.is_set():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            for piece in send(0):
                client.sendall(piece)
            while stays and not stopping.wait(0.2):
                pass
            while not stopping.is_set() and client.recv(1 << 20):
                pass


# --- measuring --------------------------------------------------------------------------------------------------------


def _health_s(port: int) -> float:
    """Return the seconds that a new client waits for /healthz; infinity for another reply."""
    began = time.monotonic()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(GET + b"Authorization: Bearer " + KEY.encode() + b"\r\nConnection: close\r\n\r\n")
            reply = b"".join(iter(lambda: client.recv(65536), b""))
    except OSError:
        return float("inf")
    return time.monotonic() - began if b'"status":"ok"' in reply else float("inf")


def _memory_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _ran_s(pid: int) -> float:
    """Return the processor seconds of a process's first thread, in which the proxy serves."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def measured(port: int, pid: int, name: str, seconds: float) -> tuple[list[float], list[float], int]:
    """Return what another client waits while an attack runs, the proxy's part of it, and the proxy's peak memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets VmHWM, the peak
    started, stopping = SPAWN.Event(), SPAWN.Event()
    attacker = SPAWN.Process(target=_attack, args=(port, name, started, stopping), daemon=True)
    attacker.start()
    started.wait(60)
    times: list[float] = []
    ran: list[float] = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        before = _ran_s(pid)
        times.append(_health_s(port))
        ran.append(_ran_s(pid) - before)
        time.sleep(PAUSE_S)
    stopping.set()
    attacker.join(10)
    attacker.kill()
    return times, ran, _memory_bytes(pid, "VmHWM")


@contextlib.contextmanager
def serving(folder: Path, url: str) -> Iterator[tuple[int, int]]:
    """Run `qm serve` with a plan in front of an upstream; yield its port and its process id."""
    models = ("--ollama-url", url, "--target-model", MODEL, "--mutator-model", MODEL, "--encoder", "hash")
    data = write_dataset(folder / "questions.jsonl", ROWS)
    search = ("--operators", "neutral", "--max-calls", "200", "--budget", "2", "--cache", "off", "--save-dir", "plans")
    found = run_qm(["plan", *models, "--dataset", data, *search], folder)
    if found.code != 0:
        raise RuntimeError(found.err)
    command = [sys.executable, "-m", "query_mutator", "serve", "plans/latest", "--port", "0", "--api-key", KEY]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}
    ) as proxy:
        try:
            assert proxy.stdout is not None
            yield int(proxy.stdout.readline().decode().rsplit(":", 1)[1]), proxy.pid
        finally:
            proxy.send_signal(signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    flags = parser.parse_args()
    ours, theirs = SPAWN.Pipe()
    upstream = SPAWN.Process(target=_upstream, args=(theirs,), daemon=True)
    upstream.start()
    failed = 0
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), ours.recv()) as (port, pid):
        print(f"{'attack':36}{'asked':>7}{'median s':>10}{'worst s':>10}{'of CPU':>10}{'MB':>7}")
        for name in flags.attacks:
            times, ran, memory = measured(port, pid, name, flags.seconds)
            is_wrong = median(times) > MEDIAN_S or max(times) > WORST_S or memory > MEMORY_BYTES
            failed += is_wrong
            row = f"{name:36}{len(times):7}{median(times):10.3f}{max(times):10.3f}{max(ran):10.3f}{memory / 1e6:7.0f}"
            print(row + ("  too much" if is_wrong else ""), flush=True)
            time.sleep(RECOVERY_S)
    ours.send(None)
    print(f"{len(flags.attacks)} attacks, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
