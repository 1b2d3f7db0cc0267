"""Servers as people have them: fields they refuse, counts they leave out, models that load, connections that end."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.promises.helpers import QM, TRAIN, good, last_metrics, latest, model_server, one_line_error, run, transcript

#: What a server answers once, by a field that it refuses or by number of the call; then `usage`, and whether it closes.
REFUSALS = {
    "usage": (503, "Loading model"),
    "temperature": (400, "'temperature' does not support 0 with this model."),
    "max_tokens": (400, "'max_tokens' is not supported. Use 'max_completion_tokens'."),
    "seed": (422, "[{'loc': ['body', 'seed'], 'msg': 'Extra inputs are not permitted'}]"),
    "response_format": (400, "This response_format is unavailable now"),
}


class Handler(BaseHTTPRequestHandler):
    """A server of OpenAI's routes that refuses `field`; it gives no usage, and closes connections without a word."""

    protocol_version = "HTTP/1.1"
    field = ""
    bodies: list[dict[str, Any]]

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def send(self, status: int, reply: dict[str, Any]) -> None:
        text = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        self.close_connection = True

    def do_GET(self) -> None:
        self.send(200, {"data": [{"id": "m"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        status, message = REFUSALS[self.field]
        if self.field in body or (status == 503 and len(self.bodies) <= 3):
            return self.send(status, {"error": {"message": message, "code": status}})
        said = {"content": "yes" if "verdict" in str(body["messages"]) else "Paris", "reasoning_content": "Is it Rome?"}
        return self.send(200, {"choices": [{"message": said, "finish_reason": "stop"}]})


@pytest.mark.parametrize("field", REFUSALS)
def test_no_call_fails_at_a_server_with_its_own_ways(field: str, tmp_path: Path) -> None:
    """What target or judge refuses is learned from one call, and nothing that a server leaves out fails a step."""
    kind = type("Own", (Handler,), {"field": field, "bodies": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rows = [{"query": f"What is the capital of country {n}?", "accept": ["Paris"]} for n in range(8)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    flags = (
        f"--openai-url http://127.0.0.1:{server.server_address[1]} --target-model m --judge-model m --dataset own.jsonl"
    )
    more = (
        "--operators none --forms short_answer --reward right=1,judge=1 --encoder hash --embedding-dims 4 --cache off"
    )
    sizes = "--num-processes 4 --num-steps 4 --num-env-steps 16 --batch-size 1 --eval-interval 0 --no-evaluate"
    with closing(server.socket):
        good(run([*TRAIN, *f"{flags} {more} {sizes} --num-mini-batch 2".split()], cwd=tmp_path))
    rows = transcript(latest(tmp_path))
    assert all(row["valid"] for row in rows)
    assert {(row["answer"], row["thought"]) for row in rows if row["answer"]} == {("Paris", "Is it Rome?")}
    assert last_metrics(latest(tmp_path))["llm/failed_calls"] == 0
    assert sum(field in body for body in kind.bodies) <= 1
    assert not any("n" in body for body in kind.bodies)


@pytest.mark.parametrize(("bundle", "reason"), [("gone.pem", "No such file"), ("own.jsonl", "no certificate")])
def test_authorities_that_cannot_be_read_are_named(bundle: str, reason: str, tmp_path: Path) -> None:
    """A bundle of certificates that is not there, or has none, is one line that names it and its variable."""
    (tmp_path / "own.jsonl").write_text("{}", encoding="utf-8")
    doctor = [*QM, "doctor", "--openai-url", "https://127.0.0.1:9", "--target-model", "m"]
    said = one_line_error(run(doctor, cwd=tmp_path, env={"REQUESTS_CA_BUNDLE": str(tmp_path / bundle)}))
    assert f"REQUESTS_CA_BUNDLE={tmp_path / bundle}" in said
    assert reason in said


MANY = """
import resource, sys
import ollama_utils
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
texts = [f"Say {n}" for n in range(1024)]
assert ollama_utils.batch_query_target_model(texts, model="echo", url=sys.argv[1], batch_size=1024) == texts
"""


def test_a_thousand_calls_at_once(tmp_path: Path) -> None:
    """1,024 calls at once fit into the 1,024 open files that most systems allow a process at first."""
    (tmp_path / "many.py").write_text(MANY, encoding="utf-8")
    with model_server(latency_ms=400, num_parallel=1024) as server:
        good(run([tmp_path / "many.py", server.url], cwd=tmp_path))
        assert server.stats()["max_in_service"] > 256
