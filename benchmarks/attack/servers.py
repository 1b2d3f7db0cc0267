"""The real client, commands and small trainings against a server that misbehaves in one of about 110 ways.

A case is wrong when an answer belongs to another request, or an odd but right reply is not taken.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.attack.behaviors import BEHAVIORS, GOOD, LARGE, UNCHECKED
from benchmarks.attack.harness import Finished, Outcome, run_cli, run_qm
from benchmarks.attack.hostile import MODEL, HostileServer, answer_to
from query_mutator.errors import QueryMutatorError
from query_mutator.llm.client import ModelServer
from query_mutator.llm.stack import ClientStack, build_client
from query_mutator.types import MAX_ERROR_CHARS, ChatRequest, Completion
from train_query_mutator import main as train_main

TIMEOUT_S = 0.6
SLOW_S = 20.0  # for a reply that is to arrive: a busy machine is no failure
MAX_CASE_S = 30.0
PROBES_S = 2.0  # then no further question to the server: each may take its time-out of 10 s


def attack(rng: random.Random, folder: Path) -> Outcome:
    """Run one case: a client, a question to the server about itself, a command, or a training."""
    name = rng.choice(list(BEHAVIORS))
    kind = rng.choices([_calls, _probes, _command, _training], weights=[30, 4, 1, 2])[0]
    began = time.monotonic()
    outcome: Outcome = kind(rng, folder, name)
    if time.monotonic() - began > MAX_CASE_S and outcome.verdict == "ok":
        return Outcome(case=outcome.case, verdict="hang", detail=f"{time.monotonic() - began:.0f} s")
    return outcome


def _calls(rng: random.Random, folder: Path, name: str) -> Outcome:
    """Make calls through the whole client; every answer must be the one its request asked for."""
    backend = rng.choice(["ollama", "openai"])
    share, threads = rng.choice([1.0, 0.4]), rng.choice([1, 3])
    case = f"{name}: {backend}, share {share}, {threads} threads"
    server = HostileServer(BEHAVIORS[name], rng=rng, share=share, limit=1 if name in LARGE else 1000)
    stack = build_client(
        server.url,
        backend=backend,
        batch_size=threads,
        timeout_s=SLOW_S if name in GOOD else TIMEOUT_S,
    )
    requests = [ChatRequest.user(f"question {number} {rng.random()}", model=MODEL) for number in range(6)]
    try:
        with ThreadPoolExecutor(threads) as pool:
            replies = list(pool.map(stack.client.complete, requests))
        wrong = _wrong(name, requests, replies, server)
    finally:
        stack.close()
        server.close()
    return Outcome(case=case, verdict="wrong" if wrong else "ok", detail=wrong)


def _wrong(name: str, requests: Sequence[ChatRequest], replies: Sequence[Completion], server: HostileServer) -> str:
    """Return what is wrong with replies, "" for nothing."""
    for request, reply in zip(requests, replies, strict=True):
        meant = server.meant.get(request.messages[0].content, "").strip()
        if reply.error is None and reply.text != meant and name not in UNCHECKED:
            return f"answered {reply.text[:200]!r}, meant was {meant[:200]!r}"
        if reply.error is not None and name in GOOD:
            return f"a right reply is an error: {reply.error}"
        if reply.error is not None and (len(reply.error.message) > MAX_ERROR_CHARS or "\n" in reply.error.message):
            return f"an error of {len(reply.error.message)} characters"
    return ""


def _probes(rng: random.Random, folder: Path, name: str) -> Outcome:
    """Ask a server about itself; only the errors of the package may come out."""
    if name in _STALLING and rng.random() < 0.8:
        name = "closes before"
    backend = rng.choice(["ollama", "openai"])
    server = HostileServer(BEHAVIORS[name], rng=rng, share=rng.choice([1.0, 0.5]), probes=True)
    stack = build_client(server.url, backend=backend, timeout_s=TIMEOUT_S, max_retries=0)
    began = time.monotonic()
    try:
        for question in _questions(stack, stack.servers[0]):
            try:
                question()
            except QueryMutatorError as error:
                if len(str(error)) > 3 * MAX_ERROR_CHARS:
                    return Outcome(case=f"{name}: probes", verdict="wrong", detail=f"{len(str(error))} characters")
            if time.monotonic() - began > PROBES_S:
                break
    finally:
        stack.close()
        server.close()
    return Outcome(case=f"{name}: {backend}, probes")


def _questions(stack: ClientStack, server: ModelServer) -> list[Any]:
    return [
        lambda: server.version(timeout_s=1.0),
        lambda: server.models(timeout_s=1.0),
        lambda: server.require_model(MODEL),
        lambda: server.digest(MODEL),
        lambda: server.model_info(MODEL),
        lambda: server.context(MODEL),
        lambda: server.slots(MODEL),
        lambda: server.describe_model(MODEL),
        lambda: stack.require_models([MODEL]),
    ]


def _command(rng: random.Random, folder: Path, name: str) -> Outcome:
    """Run `qm doctor` against the server."""
    behavior = BEHAVIORS["closes before" if name in _STALLING else name]
    server = HostileServer(behavior, rng=rng, share=rng.choice([1.0, 0.5]), probes=rng.random() < 0.5)
    argv = ["doctor", "--ollama-url", server.url, "--probe-s", "1", "--encoder", "hash", "--target-model", MODEL]
    try:
        done = run_qm(argv, folder)
    finally:
        server.close()
    return _judged(done, name)


def _training(rng: random.Random, folder: Path, name: str) -> Outcome:
    """Train for a few steps; every valid row of the transcript has the answer to its own rewrite."""
    behavior = BEHAVIORS["closes before" if name in _STALLING else name]
    rows = [{"id": str(number), "query": f"what is {number}?", "accept": ["sorted"]} for number in range(12)]
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = HostileServer(behavior, rng=rng, share=rng.choice([1.0, 0.3]), limit=1 if name in LARGE else 1000)
    flags = {
        "ollama-url": server.url, "target-model": MODEL, "dataset": "q.jsonl", "num-env-steps": 16, "num-processes": 2,
        "num-steps": 4, "num-mini-batch": 1, "batch-size": 2, "timeout-s": TIMEOUT_S, "max-retries": 1,
        "max-failure-rate": 1, "wait-for-server": 0, "eval-interval": 0, "save-dir": "runs",
        "encoder": "hash", "cache-path": "replies.sqlite",
    }  # fmt: skip
    argv = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    argv += ["--no-evaluate"]
    try:
        done = run_cli(train_main, argv, folder)
    finally:
        server.close()
    outcome = _judged(done, name)
    for path in folder.glob("runs/*/transcripts.jsonl"):
        if outcome.verdict == "ok" and (wrong := _misplaced(path, server)):
            return Outcome(case=outcome.case, verdict="wrong", detail=wrong)
    return outcome


#: A stall takes a whole time-out of a probe, which is 10 s; the client's own cases have them.
_STALLING = {"stall", "stall in head", "stall in body", "dribble", "dribble of headers", "100 flood", "endless header"}


def _judged(done: Finished, name: str) -> Outcome:
    outcome = done.outcome()
    if outcome.verdict == "ok" and "\x1b[31mEVIL" in done.out + done.err:
        return Outcome(
            case=f"{name}: {done.case}", verdict="wrong", detail="a terminal escape of the server is printed"
        )
    return Outcome(case=f"{name}: {outcome.case}", verdict=outcome.verdict, detail=outcome.detail)


def _misplaced(transcripts: Path, server: HostileServer) -> str:
    """Return the first valid row whose answer begins as that to a prompt without its rewrite, "" for none."""
    prompts = {answer_to(prompt): prompt for prompt in server.meant}  # forms say more than the rewrite
    length = len(answer_to(""))
    for line in transcripts.read_text().splitlines():
        row = json.loads(line)
        answer = str(row.get("answer"))
        asked = prompts.get(answer[:length], "")
        if row.get("valid") and "cut" not in row and answer.startswith("`sorted`") and row["rewrite"] not in asked:
            return f"{row['rewrite'][:100]!r} is answered by {answer[:100]!r}"
    return ""
