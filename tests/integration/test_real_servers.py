"""What hosted servers, proxies and terminals do that a local Ollama and UTF-8 do not."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from query_mutator.encoder import Encoder
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.testing import StubServer
from query_mutator.types import ChatRequest
from tests.integration.proxied import KILL, MODEL, SORT, VIRTUAL, proxy
from tests.qm_command import qm, serving
from tests.scripted_server import ScriptedServer, http

FAR = "http://models.invalid:8000"  # which only the proxy finds
QUESTION = {"messages": [{"role": "user", "content": KILL}]}


@contextmanager
def front(server: StubServer, *, base: str = "/v1") -> Iterator[str]:
    """Serve `server` with `base` in the place of /v1, also as an HTTP proxy of any host; yield the address."""
    session = requests.Session()
    session.trust_env = False

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            target = urlsplit(self.path).path
            is_there = target.startswith((f"{base}/", "/api/"))
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = server.url + target.replace(base, "/v1", 1) if is_there else f"{server.url}/nowhere"
            reply = session.request(self.command, url, data=body, timeout=20)
            self.send_response(reply.status_code)
            self.send_header("Content-Type", reply.headers["Content-Type"])
            self.send_header("Content-Length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


@pytest.mark.parametrize("base", ["/v1beta/openai", "/api/paas/v4"])
def test_another_path_than_v1_is_kept(base: str, plan: Path, tiny_server: StubServer, tmp_path: Path) -> None:
    with front(tiny_server, base=base) as url:
        named = ("--openai-url", url + base)
        assert qm("doctor", *named, "--target-model", MODEL, "--no-probe") == 0
        with serving(plan, tmp_path, *named) as (_, ours):
            listed = requests.get(f"{ours}/v1/models", timeout=20).json()
            assert {MODEL, VIRTUAL} <= {row["id"] for row in listed["data"]}
            for model in (MODEL, VIRTUAL):
                reply = requests.post(f"{ours}/v1/chat/completions", json={"model": model, **QUESTION}, timeout=20)
                assert (reply.status_code, reply.json()["model"]) == (200, model)


def test_a_proxy_of_the_environment_is_used_and_named_when_it_is_dead(
    plan: Path,
    tiny_server: StubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with contextlib.ExitStack() as stack:
        with front(tiny_server) as url:
            monkeypatch.setenv("http_proxy", url.replace("//", "//user:hunter22@"))
            _, ours = stack.enter_context(serving(plan, tmp_path, "--ollama-url", FAR))
            for model in (MODEL, VIRTUAL):
                reply = requests.post(f"{ours}/api/chat", json={"model": model, **QUESTION}, timeout=20)
                assert reply.status_code == 200
            assert VIRTUAL in requests.get(f"{ours}/api/tags", timeout=20).text
        gone = requests.post(f"{ours}/api/chat", json={"model": MODEL}, timeout=20)
        assert gone.status_code == 502
    assert qm("doctor", "--ollama-url", FAR, "--target-model", MODEL) == 2
    for said in (gone.text, capsys.readouterr().err):
        assert url.removeprefix("http://") in said
        assert FAR in said
        assert "hunter22" not in said


def test_quotes_and_blanks_around_the_servers_address(
    tiny_server: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for marks in (' "{}" ', "'{}'", '" {}"'):
        monkeypatch.setenv("OLLAMA_HOST", marks.format(tiny_server.url))
        assert qm("doctor", "--target-model", MODEL, "--no-probe") == 0
        assert tiny_server.url in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_no_result_is_lost_where_the_output_has_another_encoding(
    encoding: str, plan: Path, tiny_server: StubServer, tmp_path: Path
) -> None:
    question = "sort my list \u2192 \u597d caf\u00e9 \U0001f600"
    env = {**os.environ, "PYTHONIOENCODING": encoding, "OLLAMA_HOST": tiny_server.url}

    def said(*words: str) -> str:
        command = [sys.executable, "-m", "query_mutator", *words]
        done = subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode(encoding)

    found = json.loads(said("rewrite", question, "--checkpoint", str(plan), "--json"))
    assert found["question"] == question
    assert "caf" in said("rewrite", question, "--checkpoint", str(plan))
    assert "--canned" in said("test-server", "--help-all")


PARTS = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "Paris"}]


@pytest.mark.parametrize("end", [{"finish_reason": None}, {"finish_reason": ""}, {}])
@pytest.mark.parametrize(("content", "text"), [("Paris", "Paris"), (PARTS, "Paris"), (None, ""), ([], ""), (..., "")])
def test_a_whole_text_is_an_answer_whatever_its_shape(end: dict[str, Any], content: Any, text: str) -> None:
    message = {} if content is ... else {"content": content}
    reply = json.dumps({"choices": [{"message": message, **end}]})
    with closing(ScriptedServer(http(reply))) as server, closing(OpenAIBackend(server.url)) as backend:
        found = backend.complete(ChatRequest.user("capital?", model="m"))
    assert (found.text, found.error and found.error.kind) == (text, None if text else "empty")


def test_the_gate_reads_a_refusal_in_parts(hash_encoder: Encoder) -> None:
    said = [{"type": "text", "text": text} for text in ("I'm sorry, ", "but I can't help with that.")]
    parts, plain = (json.dumps({"choices": [{"message": {"content": each}}]}) for each in (said, "Use `sorted`."))
    with closing(ScriptedServer(http(parts), http(plain))) as server, proxy(server.url, hash_encoder) as url:
        body = {"model": VIRTUAL, "messages": [{"role": "user", "content": SORT}]}
        reply = requests.post(f"{url}/v1/chat/completions", json=body, timeout=20)
        assert (reply.status_code, len(server.requests) > 1) == (200, True)
