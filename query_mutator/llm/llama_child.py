"""The program of a LlamaProcess: load a GGUF file, print the server's address, and end with the parent process.

python llama_child.py FILE NAME SLOTS CONTEXT PORT SECONDS     the key that requests must carry is a line of stdin

It imports nothing of ours, so that it runs by its path.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading

READY, FAILED = "READY", "FAILED"  # the first word of the line that ends a start
_POLL_S = 0.5
_ERRORS_ONLY = 1  # llama.cpp's verbosity


def main(path: str, name: str, slots: int, context: int, port: int, start_s: int) -> None:
    """Serve a file until the parent process is gone; `context` is that of a slot, and port 0 takes a free one.

    The system ends the process after `start_s` in which it does not serve: native code holds the interpreter meanwhile.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(start_s)
    parent = os.getppid()
    key = sys.stdin.readline().strip()
    waiting = threading.Thread(target=_end_with, args=(parent,), daemon=True)
    waiting.start()
    try:
        server = _serve(path, name, slots, context, port, key)
    except Exception as error:  # whatever the binding raises
        print(FAILED, str(error).partition("\n")[0], flush=True)
        return
    signal.alarm(0)
    print(READY, server.listening_address, flush=True)  # type: ignore[attr-defined]
    waiting.join()


def _serve(path: str, name: str, slots: int, context: int, port: int, key: str) -> object:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.model_alias = {name}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.api_keys = [key]  # llama.cpp lets pages of any origin call it
    params.n_parallel = slots
    params.n_ctx = context * slots  # the server divides it among the slots, each of which has at most the model's own
    params.cache_ram_mib = 0  # by default prompts that left their slot stay in up to 8 GB
    params.verbosity = _ERRORS_ONLY
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():  # else one for each core
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    return xllamacpp.Server(params)


def _end_with(parent: int) -> None:
    """End this process once the parent has closed its end of stdin, or is gone and a child of it holds that end."""
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], _POLL_S)[0] and not os.read(sys.stdin.fileno(), 1):
            break
    os._exit(0)  # the server's threads would wait for requests


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
