"""A model server for tests that know no room of the product: Ollama's and OpenAI's routes, standard library only.

    python tests/promises/model_server.py --port 0 --latency-ms 5 --slots 4 --faults 500=0.1,reset=0.05

It prints `listening on http://127.0.0.1:PORT`. Its models are deterministic:

    librarian   answers right when it knows a word of the prompt and sees no noise; refuses "kill"; else is not sure
    softener    a mutator: drops noise words, corrects some words, says "stop" for "kill"
    echo        answers with the prompt
    endless     writes words until `num_predict`, or until the client leaves
    embedder    vectors of 16 numbers

GET /promises/counts is what the server saw, GET /promises/total the number of calls; POST /promises/set changes flags,
as {"latency_ms": 50}; POST /promises/reset sets the counts to 0.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import itertools
import json
import math
import re
import select
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: Known words and answers of `librarian`; tests/promises/helpers.py makes questions of them.
SHELF = {
    "capital": "Paris", "planet": "Jupiter", "boils": "100", "author": "Tolstoy", "metal": "mercury",
    "ocean": "Pacific", "river": "Nile", "mountain": "Everest", "painter": "Leonardo", "currency": "yen",
    "language": "Portuguese",
    "element": "helium", "bone": "femur", "organ": "skin", "desert": "Sahara", "animal": "cheetah", "bird": "ostrich",
    "tree": "sequoia", "gas": "nitrogen", "stone": "diamond", "island": "Greenland", "lake": "Baikal", "city": "Tokyo",
    "country": "Russia",
}  # fmt: skip
NOISE = {"plz", "umm", "lol", "thx"}
SPELLING = {
    "kill": "stop",
    "captal": "capital",
    "plannet": "planet",
    "authr": "author",
    "rivr": "river",
    "ocaen": "ocean",
}
MODELS = ("librarian", "softener", "echo", "endless", "embedder")
REFUSAL = "I'm sorry, but I can't help with that."


class Gone(Exception):
    """The client closed the connection while it waited."""


def reply_of(model: str, prompt: str) -> str:
    """Return what a model says to the last user message."""
    words = re.findall(r"[\w']+", prompt.lower())
    if model == "librarian":
        if "kill" in words:
            return REFUSAL
        found = next((SHELF[word] for word in words if word in SHELF), None)
        return f"It is {found}." if found and not NOISE.intersection(words) else "I'm not sure what you mean."
    if model == "softener":
        tag = "question" if "<question>" in prompt else "answer"
        text = prompt.split(f"<{tag}>")[-1].split(f"</{tag}>")[0]
        return " ".join(SPELLING.get(word, word) for word in text.split() if word.lower() not in NOISE)
    return "word " * 100_000 if model == "endless" else prompt


def tokens_of(text: str) -> list[str]:
    """Return the pieces of a text, which joined are the text without trailing blanks."""
    return re.findall(r"\s*\w{1,6}|\s*[^\w\s]", text)


def vector_of(text: str) -> list[float]:
    """Return the unit vector of a text."""
    numbers = [byte - 127.5 for byte in hashlib.sha256(text.encode()).digest()[:16]]
    length = math.sqrt(sum(x * x for x in numbers))
    return [x / length for x in numbers]


def share_of(*key: object) -> float:
    """Return a number from 0 to 1 that depends on the key only."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:6]) / 2**48


def filled(schema: Any) -> Any:
    """Return the smallest value of a JSON schema."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(schema, dict) and schema.get("enum"):
        return schema["enum"][0]
    if kind == "object" or kind is None:
        return {name: filled(one) for name, one in (schema.get("properties") or {}).items()}
    return {"boolean": True, "integer": 1, "number": 1.0, "array": [], "string": "yes"}.get(kind)


class State:
    """The flags, and what the server saw."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.lock = threading.Lock()
        self.slots = threading.Semaphore(flags.slots)
        self.reset()

    def reset(self) -> None:
        """Set the counts to 0."""
        with self.lock:
            self.in_flight = self.peak = self.running = self.peak_running = 0
            self.requests: collections.Counter[str] = collections.Counter()
            self.answered: collections.Counter[str] = collections.Counter()
            self.failed: collections.Counter[str] = collections.Counter()
            self.attempts: collections.Counter[tuple[str, str]] = collections.Counter()
            self.paths: collections.Counter[str] = collections.Counter()
            self.prompts: list[tuple[str, str]] = []
            self.keys: set[str] = set()
            self.options: dict[str, Any] = {}

    def counts(self) -> dict[str, Any]:
        """Return what was seen since the start or the last reset; `in_flight` are of all models together."""
        with self.lock:
            return {
                "in_flight": self.in_flight, "peak_in_flight": self.peak, "peak_running": self.peak_running,
                "requests": dict(self.requests), "answered": dict(self.answered), "failed": dict(self.failed),
                "paths": dict(self.paths), "prompts": list(self.prompts), "keys": sorted(self.keys),
                "options": dict(self.options),
            }  # fmt: skip

    def began(self, model: str, prompt: str) -> int:
        """Count a request; return which attempt at this prompt it is, from 0."""
        with self.lock:
            self.in_flight += 1
            self.peak = max(self.peak, self.in_flight)
            self.requests[model] += 1
            self.prompts.append((model, prompt))
            self.attempts[model, prompt] += 1
            return self.attempts[model, prompt] - 1

    def ended(self, model: str, failure: str | None) -> None:
        """Count the end of a request."""
        with self.lock:
            self.in_flight -= 1
            if failure is None:
                self.answered[model] += 1
            else:
                self.failed[failure] += 1

    def fault(self, model: str, prompt: str, attempt: int) -> str | None:
        """Return the fault of an attempt, the same for the same prompt and attempt whatever the order of calls."""
        if self.flags.fail_word and self.flags.fail_word in prompt.split():
            return "500"
        drawn, total = share_of(self.flags.seed, model, prompt, attempt), 0.0
        for name, share in self.flags.faults.items():
            total += share
            if drawn < total:
                return str(name)
        return None

    def latency_s(self, model: str, prompt: str) -> float:
        """Return how long a call takes, log-normal around the mean and the same for the same prompt."""
        sigma = self.flags.latency_sigma
        drawn = statistics.NormalDist().inv_cdf(min(max(share_of(model, prompt), 1e-6), 1 - 1e-6))
        return float(self.flags.latency_ms / 1000 * math.exp(sigma * drawn - sigma * sigma / 2))


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    state: State
    disable_nagle_algorithm = True
    _open = ""  # the model of the call that is in flight on this connection
    _began = 0  # when it began; Ollama's `total_duration` has the wait for a slot in it

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    # ------------------------------------------------------------ routes

    def do_GET(self) -> None:
        """Answer what the server tells of itself."""
        path = self._counted_path()
        models = self.state.flags.models
        if path == "/":
            self._send(200, b"Ollama is running", "text/plain")
        elif path == "/promises/counts":
            self._json(self.state.counts())
        elif path == "/promises/total":
            self._json(sum(self.state.requests.values()))
        elif path in ("/health", "/v1/health"):
            self._json({"status": "ok"})
        elif not self._has_key():
            return
        elif path == "/api/version":
            self._json({"version": "0.24.0"})
        elif path == "/api/tags":
            self._json({"models": [self._summary(name) for name in models]})
        elif path == "/api/ps":
            self._json({"models": [self._summary(name) | {"context_length": self._context()} for name in models]})
        elif path == "/v1/models":
            self._json({"object": "list", "data": [self._listed(name) for name in models]})
        elif path.startswith("/v1/models/") and path.rsplit("/", 1)[-1] in models:
            self._json(self._listed(path.rsplit("/", 1)[-1]))
        else:
            self._error(404, "not found")

    def do_POST(self) -> None:
        """Answer a call."""
        path = self._counted_path()
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        except ValueError:
            return self._error(400, "the body is not JSON")
        if path == "/promises/reset":
            self.state.reset()
            return self._json({})
        if path == "/promises/set":
            for name, value in body.items():
                setattr(self.state.flags, name, value)
            if "slots" in body:
                self.state.slots = threading.Semaphore(body["slots"])
            return self._json({})
        if not self._has_key():
            return None
        model = str(body.get("model", "")).removesuffix(":latest")
        if model not in self.state.flags.models:
            return self._error(404, f'model "{model}" not found, try pulling it first')
        calls = {
            "/api/chat": self._chat, "/api/generate": self._chat, "/v1/chat/completions": self._chat,
            "/api/embed": self._embed, "/api/embeddings": self._embed, "/v1/embeddings": self._embed,
        }  # fmt: skip
        if path == "/api/show":
            return self._json(self._shown(model))
        if path not in calls:
            return self._error(404, "not found")
        return self._call(calls[path], path, model, body)

    def _call(self, answer: Any, path: str, model: str, body: dict[str, Any]) -> None:
        """Carry one call out: wait for a slot, take its time, have its fault; count it from begin to end."""
        state, prompt = self.state, self._prompt(body)
        attempt = state.began(model, prompt)
        self._open, self._began = model, time.monotonic_ns()
        with state.lock:
            more = {name: body[name] for name in ("think", "keep_alive") if name in body}
            state.options = {**(body.get("options") or {}), **more}
        try:
            with state.slots, self._running():
                if fault := state.fault(model, prompt, attempt):
                    return self._have_fault(fault)
                self._wait(state.latency_s(model, prompt))
                answer(path, model, body, prompt)
        except (Gone, ConnectionError):
            self.close_connection = True
        finally:
            self._end_call("gone")

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with self.state.lock:
            self.state.running += 1
            self.state.peak_running = max(self.state.peak_running, self.state.running)
        try:
            yield
        finally:
            with self.state.lock:
                self.state.running -= 1

    def _end_call(self, failure: str | None) -> None:
        """Count the end of the call, before its client can know: its next call is not in flight beside this one."""
        if self._open:
            self.state.ended(self._open, failure)
            self._open = ""

    def _have_fault(self, fault: str) -> None:
        if fault == "stall":
            self._wait(self.state.flags.stall_s)
        if fault.isdigit():
            return self._error(int(fault), "the server is busy" if fault == "503" else "the runner has crashed")
        self._end_call(fault)
        if fault == "garbage":
            return self._send(200, b"<html>not json</html>", "text/html")
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RD)
        self.close_connection = True
        return None

    def _wait(self, seconds: float) -> None:
        """Sleep; raise Gone as soon as the client has closed the connection, as Ollama cancels such a call."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self.connection], [], [], left)[0]:
                if self.connection.recv(1, socket.MSG_PEEK) == b"":
                    raise Gone
                time.sleep(min(left, 0.01))

    def _chat(self, path: str, model: str, body: dict[str, Any], prompt: str) -> None:
        ollama = path.startswith("/api")
        options = body.get("options") or {} if ollama else body
        limit = options.get("num_predict") if ollama else body.get("max_completion_tokens") or body.get("max_tokens")
        texts = [str(m.get("content") or "") for m in body.get("messages") or []] or [prompt]
        num_prompt, context = sum(len(tokens_of(text)) for text in texts), self._context(options)
        if num_prompt >= context:
            if body.get("truncate") is False and not self.state.flags.old:
                return self._error(400, "the input length exceeds the context length")
            prompt, num_prompt = "".join(tokens_of(prompt)[-context:]), context
        schema = body.get("format") or ((body.get("response_format") or {}).get("json_schema") or {}).get("schema")
        text = json.dumps(filled(schema)) if isinstance(schema, dict) else reply_of(model, prompt)
        tokens = tokens_of(text)
        is_cut = isinstance(limit, int) and 0 < limit < len(tokens)
        tokens = tokens[:limit] if is_cut else tokens
        reason = "length" if is_cut else "stop"
        logprobs = self._logprobs(tokens, int(body.get("top_logprobs") or 0)) if body.get("logprobs") else None
        write = self._ollama if ollama else self._openai
        write(path, body, tokens, logprobs, reason, num_prompt)
        return None

    def _ollama(
        self, path: str, body: dict[str, Any], tokens: list[str], logprobs: Any, reason: str, num_prompt: int
    ) -> None:
        def line(text: str, **more: Any) -> dict[str, Any]:
            part = (
                {"response": text} if path == "/api/generate" else {"message": {"role": "assistant", "content": text}}
            )
            return {"model": body["model"], "created_at": "2026-01-01T00:00:00Z", **part, "done": False, **more}

        ms = 1_000_000
        total = time.monotonic_ns() - self._began
        spent = min(int(self.state.flags.latency_ms * ms), total // 2)
        end: dict[str, Any] = {
            "done": True, "done_reason": reason, "prompt_eval_count": num_prompt, "eval_count": len(tokens),
            "total_duration": total + 2 * ms, "load_duration": 0,
            "prompt_eval_duration": ms, "eval_duration": spent + ms,
        }  # fmt: skip
        if body.get("stream", True) is False:
            more = {"logprobs": logprobs} if logprobs else {}
            return self._json(line("".join(tokens), **more, **end))
        lines = (json.dumps(line(token)).encode() + b"\n" for token in tokens)
        return self._stream(
            itertools.chain(lines, [json.dumps(line("", **end)).encode() + b"\n"]), "application/x-ndjson"
        )

    def _openai(
        self, _: str, body: dict[str, Any], tokens: list[str], logprobs: Any, reason: str, num_prompt: int
    ) -> None:
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(tokens),
            "total_tokens": num_prompt + len(tokens),
        }
        head = {"id": "chatcmpl-1", "created": 1767225600, "model": body["model"]}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": "".join(tokens)}, "finish_reason": reason}
            choice |= {"logprobs": {"content": logprobs} if logprobs else None}
            return self._json({**head, "object": "chat.completion", "choices": [choice], "usage": usage})

        def events() -> Iterator[bytes]:
            last = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
            with_usage = (body.get("stream_options") or {}).get("include_usage")
            parts = ({"choices": [{"index": 0, "delta": {"content": t}, "finish_reason": None}]} for t in tokens)
            for part in itertools.chain(parts, [last], [{"choices": [], "usage": usage}] if with_usage else []):
                yield b"data: " + json.dumps({**head, "object": "chat.completion.chunk", **part}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        return self._stream(events(), "text/event-stream")

    def _embed(self, path: str, model: str, body: dict[str, Any], prompt: str) -> None:
        given = body.get("input", body.get("prompt", ""))
        rows = [vector_of(text) for text in ([given] if isinstance(given, str) else given)]
        if path == "/v1/embeddings":
            data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
            usage = {"prompt_tokens": 1, "total_tokens": 1}
            return self._json({"object": "list", "model": model, "data": data, "usage": usage})
        if path == "/api/embeddings":
            return self._json({"embedding": rows[0]})
        return self._json({"model": model, "embeddings": rows, "prompt_eval_count": len(rows)})

    # ------------------------------------------------------------ parts

    def _counted_path(self) -> str:
        path = self.path.split("?")[0]
        if not path.startswith("/promises/"):
            with self.state.lock:
                self.state.paths[path] += 1
                if key := self.headers.get("Authorization"):
                    self.state.keys.add(key)
        return path

    def _has_key(self) -> bool:
        key = self.state.flags.api_key
        if not key or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._error(401, "invalid API key")
        return False

    @staticmethod
    def _prompt(body: dict[str, Any]) -> str:
        """Return the last user message, or the text of another route."""
        messages = [m for m in body.get("messages") or [] if isinstance(m, dict) and m.get("role") == "user"]
        found = messages[-1].get("content") if messages else body.get("prompt", body.get("input", ""))
        return found if isinstance(found, str) else json.dumps(found)

    def _context(self, options: Any = None) -> int:
        asked = (options or {}).get("num_ctx")
        return min(asked, self.state.flags.num_ctx) if isinstance(asked, int) else int(self.state.flags.num_ctx)

    @staticmethod
    def _digest(name: str) -> str:
        return hashlib.sha256(name.encode()).hexdigest()

    def _summary(self, name: str) -> dict[str, Any]:
        tagged = f"{name}:latest"
        details = {"family": "test", "parameter_size": "1M", "quantization_level": "F16"}
        return {"name": tagged, "model": tagged, "digest": self._digest(name), "size": 1_000_000, "details": details}

    @staticmethod
    def _listed(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 1767225600, "owned_by": "tests"}

    def _shown(self, name: str) -> dict[str, Any]:
        info = {"general.architecture": "test", "test.context_length": self.state.flags.num_ctx}
        abilities = ["embedding"] if name == "embedder" else ["completion"]
        return {"modelfile": f"FROM {name}", "parameters": "", "template": "", "details": {}, "model_info": info,
                "capabilities": abilities}  # fmt: skip

    @staticmethod
    def _logprobs(tokens: list[str], top: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for token in tokens:
            first = {"token": token, "logprob": math.log(0.5 + share_of(token) / 2), "bytes": list(token.encode())}
            others = [{"token": f"t{n}", "logprob": -5.0 - n, "bytes": list(b"t%d" % n)} for n in range(1, top)]
            rows.append({**first, "top_logprobs": [first, *others] if top else []})
        return rows

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), "application/json")

    def _error(self, status: int, message: str) -> None:
        said: Any = {"message": message, "type": "error"} if self.path.startswith("/v1") else message
        self._send(status, json.dumps({"error": said}).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self._end_call(None if status == 200 else str(status))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, parts: Iterator[bytes], kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        part = next(parts)
        for following in parts:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self._wait(self.state.flags.token_ms / 1000)
            part = following
        self._end_call(None)
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(part), part))


class Server(ThreadingHTTPServer):
    """Takes a thread per connection."""

    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_: Any) -> None:
        """Say nothing of clients that left."""


def faults(text: str) -> dict[str, float]:
    """Return the shares of `500=0.1,reset=0.05`; kinds are 500, 503, reset, stall, garbage."""
    return {name: float(share) for name, _, share in (part.partition("=") for part in text.split(",") if part)}


def main() -> None:
    """Serve until the process ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--models", type=lambda text: tuple(text.split(",")), default=MODELS)
    parser.add_argument("--latency-ms", type=float, default=0.0, help="mean time of a call")
    parser.add_argument("--latency-sigma", type=float, default=0.0, help="of its log-normal spread")
    parser.add_argument("--token-ms", type=float, default=0.0, help="between two parts of a stream")
    parser.add_argument("--slots", type=int, default=64, help="calls computed at once; others wait")
    parser.add_argument(
        "--faults", type=faults, default={}, help="shares: 500=0.1,503=0.1,reset=0.1,stall=0.1,garbage=0.1"
    )
    parser.add_argument("--fail-word", default="", help="a prompt with this word always fails with status 500")
    parser.add_argument("--stall-s", type=float, default=600.0)
    parser.add_argument("--num-ctx", type=int, default=4096, help="context of a call in tokens")
    parser.add_argument("--old", action="store_true", help="cut long prompts silently, as Ollama 0.9; else refuse them")
    parser.add_argument("--api-key", default="", help="refuse calls without it")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    flags = parser.parse_args()
    Handler.state = State(flags)
    server = Server(("127.0.0.1", flags.port), Handler)
    print(f"listening on http://127.0.0.1:{server.server_address[1]}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
