"""Overhead of the embedded server: calls per second and CPU time per call, over raw keep-alive sockets.

python benchmarks/embedded_server.py                                          the ceiling
python benchmarks/embedded_server.py --connections 512 --latency-ms 1000      the width
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import subprocess
import sys
import time
import urllib.request
from typing import Any


def main() -> None:
    """Print one JSON object per repeat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000, help="calls per repeat")
    parser.add_argument("--connections", type=int, default=16, help="connections, each with one call in flight")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--latency-sigma", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "query_mutator.embedded", "--model", "echo", "--port", "0"]
    command += ["--num-parallel", str(arguments.connections), "--latency-ms", str(arguments.latency_ms)]
    command += ["--latency-sigma", str(arguments.latency_sigma)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        try:
            for _ in range(arguments.repeats):
                print(json.dumps(measure(url, calls=arguments.calls, connections=arguments.connections)), flush=True)
        finally:
            process.terminate()


def measure(url: str, *, calls: int, connections: int) -> dict[str, Any]:
    """Return rate, server CPU time per call and efficiency (service time / connections / wall time) of one repeat."""
    before = stats(url)
    began_s = time.perf_counter()
    drive(int(url.rsplit(":", 1)[1]), calls=calls, connections=connections)
    wall_s = time.perf_counter() - began_s
    after = stats(url)
    cpu_s = after["process_cpu_s"] - before["process_cpu_s"]
    service_s = after["service_s"] - before["service_s"]
    return {
        "connections": connections,
        "calls": calls,
        "wall_s": round(wall_s, 3),
        "calls_per_s": round(calls / wall_s, 1),
        "server_cpu_us_per_call": round(cpu_s / calls * 1e6, 1),
        "efficiency": round(service_s / connections / wall_s, 3),
    }


def stats(url: str) -> dict[str, Any]:
    """Return the server's counters."""
    with urllib.request.urlopen(f"{url}/debug/stats") as reply:
        return dict(json.load(reply))


def drive(port: int, *, calls: int, connections: int) -> None:
    """Make `calls` calls, one at a time on each connection."""
    selector = selectors.DefaultSelector()
    received: dict[socket.socket, bytes] = {}
    for number in range(connections):
        client = socket.create_connection(("127.0.0.1", port))
        selector.register(client, selectors.EVENT_READ)
        received[client] = b""
        client.sendall(request(number))
    sent, done = connections, 0
    while done < calls:
        for key, _ in selector.select():
            client = key.fileobj  # type: ignore[assignment]
            received[client] += client.recv(65536)
            if not is_whole(received[client]):
                continue
            received[client] = b""
            done += 1
            if sent < calls:
                client.sendall(request(sent))
                sent += 1
    for client in received:
        client.close()
    selector.close()


def request(number: int) -> bytes:
    """Return a chat request like those of the client."""
    message = {"role": "user", "content": f"question {number}: how do I end a process that does not answer any more?"}
    options = {"temperature": 0, "seed": 1, "num_predict": 256}
    payload = {"model": "echo", "messages": [message], "stream": False, "think": False, "options": options}
    body = json.dumps(payload).encode()
    return b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def is_whole(data: bytes) -> bool:
    """Return whether `data` is a whole reply."""
    head, end, body = data.partition(b"\r\n\r\n")
    return bool(end) and len(body) >= int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])


if __name__ == "__main__":
    main()
