"""A key in every place where a user can give one is in no file and no output, even when the server repeats it."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from query_mutator.cli.console import exit_code
from query_mutator.commands.main import main as qm
from tests.run_page import whole_page
from train_query_mutator import main as train

KEY = "sk-PLANTED/0123456789abcdefghijklmnopqrstuvwxyz"
FORMS = (KEY, base64.b64encode(f"me:{KEY}".encode()).decode(), json.dumps(KEY)[1:-1], KEY.replace("/", "\\/"), KEY[:20])


class _Parrot(BaseHTTPRequestHandler):
    """Ollama's and OpenAI's routes; all that is said repeats the headers of the request. Some calls fail."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body that follows its head waits for no acknowledgment
    numbers = count()
    fails_always = False

    def do_GET(self) -> None:
        """Answer the questions about the server."""
        models = [{"id": "m", "name": "m:latest", "digest": "d", "note": self._said()}]
        self._send(200, {"version": "0.9", "models": models, "data": models})

    def do_POST(self) -> None:
        """Answer a call."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = self._said()
        if "model" in body and "messages" not in body:
            self._send(200, {"capabilities": ["completion"], "model_info": {}})
        elif self.fails_always or next(self.numbers) % 9 == 8:
            self._send(400, {"error": {"message": "x" * (300 - len(KEY) // 2) + said}})
        elif body.get("stream"):
            self._stream(said)
        elif "/v1/" in self.path:
            choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
            self._send(200, {"id": said, "model": said, "choices": [choice], "usage": {"prompt_tokens": 1}})
        else:
            message = {"role": "assistant", "content": said}
            self._send(200, {"model": said, "message": message, "done": True, "done_reason": "stop"})

    def _stream(self, said: str) -> None:
        """Send the text in pieces of three characters, as OpenAI does or as Ollama does."""
        pieces = [said[at : at + 3] for at in range(0, len(said), 3)]
        if "/v1/" in self.path:
            deltas: list[Any] = [{"delta": {"content": piece}} for piece in pieces]
            rows = [{"choices": [each]} for each in [*deltas, {"delta": {}, "finish_reason": "stop"}]]
            lines = "".join(f"data: {json.dumps(row)}\n\n" for row in rows) + "data: [DONE]\n\n"
        else:
            rows = [{"message": {"content": piece}, "done": False} for piece in pieces]
            rows.append({"message": {"content": ""}, "done": True, "done_reason": "stop"})
            lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        self._send(200, lines)

    def _said(self) -> str:
        return f"sorted, said {' and '.join(f'{name} {value}' for name, value in self.headers.items())}"

    def _send(self, status: int, payload: Any) -> None:
        data = (payload if isinstance(payload, str) else json.dumps(payload)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def parrot() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Parrot)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Search all output, all log records and all files of the test when it ends."""
    for name in [
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        "OLLAMA_HOST",
        "HTTP_PROXY",
        "http_proxy",
        "NO_PROXY",
        "no_proxy",
    ]:
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.DEBUG)
    logging.getLogger("matplotlib").setLevel(logging.INFO)  # lists every font
    yield
    captured = capfd.readouterr()
    texts = {"stdout": captured.out, "stderr": captured.err, "logs": caplog.text}
    found = [(name, form) for name, text in texts.items() for form in FORMS if form in text]
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.suffix == ".html":
            content += whole_page(path).encode()
        found += [(str(path), form) for form in FORMS if form.encode() in content]
    assert not found


def run(flags: Sequence[str], tmp_path: Path, dataset: Path) -> None:
    """Make a training, a resumed one, an evaluation, a rewrite, a probe and a failing run."""
    common = [
        *(*flags, "--dataset", str(dataset), "--save-dir", str(tmp_path / "runs"), "--encoder", "hash"),
        *("--embedding-dims", "4", "--num-processes", "4", "--num-steps", "4", "--batch-size", "4"),
        *("--num-mini-batch", "2", "--operators", "spelling", "--eval-questions", "2"),
        *("--max-failure-rate", "1", "--target-model", "m", "--max-retries", "1"),
    ]
    named = [*flags, "--dataset", str(dataset)]
    words = [*common, "--num-env-steps", "16", "--no-use-linear-lr-decay"]
    assert exit_code(train, words, prog="train") == 0
    latest = str(tmp_path / "runs" / "latest")
    transcript = (tmp_path / "runs" / "latest" / "transcripts.jsonl").read_text()
    assert "sorted, said" in transcript  # the server did repeat the headers
    assert "***" in transcript
    assert "sorted, said" in whole_page(tmp_path / "runs" / "latest" / "report.html")
    assert exit_code(train, ["--resume", latest, *named, "--num-env-steps", "32", "--no-evaluate"], prog="train") == 0
    assert exit_code(qm, ["eval", latest, *named, "--json", str(tmp_path / "report.json")], prog="qm") == 0
    assert exit_code(qm, ["rewrite", "--checkpoint", latest, *flags, "plz sort"], prog="qm") == 0
    place = [word for word in flags if word != "--wait-for-server" and word != "0"]
    assert exit_code(qm, ["doctor", *place, "--target-model", "m", "--batch-size", "2"], prog="qm") in (0, 2)
    _Parrot.fails_always = True
    try:
        asked_anew = ["--num-env-steps", "16", "--max-failure-rate", "0.1", "--cache", "off"]
        assert exit_code(train, [*common, *asked_anew], prog="train") in (2, 3)
        assert exit_code(qm, ["doctor", *place, "--target-model", "m"], prog="qm") == 2
    finally:
        _Parrot.fails_always = False


@pytest.mark.usefixtures("output")
def test_a_key_in_the_environment(parrot: str, tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    run(["--backend", "openai", "--openai-url", f"{parrot}/v1"], tmp_path, dataset)


@pytest.mark.usefixtures("output")
def test_a_password_of_a_proxy(parrot: str, tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", parrot.replace("//", f"//me:{KEY.replace('/', '%2F')}@"))
    run(["--backend", "openai", "--openai-url", "http://models.test/v1"], tmp_path, dataset)


@pytest.mark.usefixtures("output")
@pytest.mark.parametrize("address", [f"http://me:{KEY[:20]}@localhost:1/v1", f"http://localhost:1/v1?api_key={KEY}"])
@pytest.mark.parametrize("way", ["flag", "environment", "mistyped flag"])
def test_a_key_in_an_address_is_refused_without_repeating_it(
    address: str, way: str, tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--backend", "openai", "--target-model", "m"]
    if way == "environment":
        monkeypatch.setenv("OPENAI_BASE_URL", address)
    else:
        flags += ["--openai-url" if way == "flag" else "--openai-ulr", address]
    assert exit_code(qm, ["doctor", *flags], prog="qm") == 2
    for more in ([], ["--openai-url", address, "--dry-run"]):
        argv = [*flags, "--dataset", str(dataset), "--save-dir", str(tmp_path / "runs"), *more]
        assert exit_code(train, argv, prog="train") in (0, 2)
    assert not (tmp_path / "runs").exists()
