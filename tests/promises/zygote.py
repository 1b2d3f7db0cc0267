"""Runs commands in forks of a process that has imported torch, other libraries and the product: 0.2 s in place of ten.

A command reads its own environment and files. Each request on the socket is one JSON object: argv, cwd, env, stdout,
stderr (paths), limit_bytes. The reply is the process number of the command and then its exit code, a line each.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
from typing import Any, TextIO

THIRD_PARTY = (
    *("numpy", "torch", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "torch.export", "gymnasium"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "scipy.special", "scipy.stats", "requests", "cyclopts"),
    *("tensorboard.compat.proto", "tensorboard.summary.writer.record_writer", "rich"),
    "aiohttp.web",
)
PRODUCT = ("train_query_mutator", "rl_query_mutator_env", "benchmark_batching", "query_mutator.testing")


def run_python(argv: list[str]) -> None:
    """Do what `python ARGV` does for a script or `-m MODULE`."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
        runpy.run_path(argv[0], run_name="__main__")


def exit_code(argv: list[str]) -> int:
    """Run a command to its end as the interpreter does, and return its exit code."""
    code = 0
    try:
        run_python(argv)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def become(request: dict[str, Any]) -> None:
    """Take the folder, environment, streams and limits of a request, run its command, and end."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for number, path in ((1, request["stdout"]), (2, request["stderr"])):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if limit := request["limit_bytes"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    os._exit(exit_code(request["argv"]))


def start(stream: TextIO) -> int:
    """Run the command that a client asks for, in a fork; return its process number."""
    request = json.loads(stream.readline())
    if (pid := os.fork()) == 0:
        os.closerange(3, 256)
        become(request)
    print(pid, file=stream, flush=True)
    return pid


def report_ends(clients: dict[int, TextIO]) -> None:
    """Tell the clients of commands that ended their exit codes."""
    while clients and (ended := os.waitpid(-1, os.WNOHANG))[0]:
        with contextlib.suppress(OSError), clients.pop(ended[0]) as stream:
            print(os.waitstatus_to_exitcode(ended[1]), file=stream, flush=True)


def main() -> None:
    """Listen on the socket of the first argument."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    clients: dict[int, TextIO] = {}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[1])
        listening.listen(64)
        select.select([listening], [], [])  # there may be no test with a command
        for name in (*THIRD_PARTY, *PRODUCT):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.freeze()  # a fork leaves the pages of these objects shared
        while True:
            if select.select([listening], [], [], 0.01)[0]:
                stream = listening.accept()[0].makefile("rw", encoding="utf-8")
                clients[start(stream)] = stream
            report_ends(clients)


if __name__ == "__main__":
    main()
