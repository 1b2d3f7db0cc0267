"""`qm test-server`: an Ollama- and OpenAI-compatible server without a model, in its own process."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import ClassVar

from query_mutator.bounds import Share
from query_mutator.errors import UsageError
from query_mutator.files import decode_object, parse_json
from query_mutator.llm.recorded import RecordedBackend, recording_address
from query_mutator.testing import KINDS, Echo, FaultPlan, ServerSettings, start_server
from query_mutator.testing.calls import Answer, PromptError, TextModel, user_text
from query_mutator.types import ChatRequest

_ENDINGS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class StubServerFlags(ServerSettings):
    """Serve echoed, canned or recorded replies with the APIs of Ollama and OpenAI, without a model.

    Model `echo` answers with words of the prompt. GET /debug/stats has the counters.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "port", "model", "canned", "recording", "num_parallel", "latency_ms", "latency_sigma", "faults",
    )  # fmt: skip

    model: str = Echo.name
    """Names of models that echo, as a,b,c."""
    canned: Path | None = None
    """File of JSON lines {"prompt": …, "reply": …}, the replies of the model `canned`."""
    recording: str | None = None
    """Recorded replies, served under the name of their model: the name of a bundled recording, or a file."""
    faults: Share = 0.0
    """Share of calls that fail on purpose, from 0 to 1."""
    fault_kinds: str = ",".join(KINDS)
    """Kinds of failures, as a,b,c."""


def test_server(flags: StubServerFlags) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    models: dict[str, TextModel | Answer] = {name: Echo() for name in _names(flags.model)}
    if flags.canned is not None:
        models["canned"] = partial(_canned, _replies(flags.canned))
    if flags.recording is not None:
        recorded = RecordedBackend(recording_address(flags.recording))
        answer = models[recorded.recording.head.model] = partial(recorded.complete)
        answer.is_instant = True  # type: ignore[attr-defined]  # a lookup
    faults = FaultPlan(flags.faults, kinds=_names(flags.fault_kinds), seed=flags.seed) if flags.faults else None
    settings = {one.name: getattr(flags, one.name) for one in fields(ServerSettings)}
    # From here on signals are waited for: a handler that raised could strike while a lock is held.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
    try:
        with start_server(models, faults=faults, **settings) as server:
            print(f"listening on {server.url}", flush=True)
            signal.sigwait(_ENDINGS)
            for number in _ENDINGS:  # a second one ends the process at once
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)


def _canned(replies: Mapping[str, str], request: ChatRequest) -> str:
    if (prompt := user_text(request)) not in replies:
        raise PromptError(f"no reply is known to the prompt {prompt[:80]!r}")
    return replies[prompt]


def _replies(path: Path) -> dict[str, str]:
    try:
        rows = [decode_object(line, parse_json) for line in path.read_bytes().splitlines()]
        return {str(row["prompt"]): str(row["reply"]) for row in rows}
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f'--canned {path}: {error}; each line is {{"prompt": "…", "reply": "…"}}') from None


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
