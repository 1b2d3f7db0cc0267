"""Answer the lines of a file with `batch_size` calls in flight: every line is a flow, every answer is journaled.

A line of the input is one of these; the output has one row per line in the same order, in the format of its line:

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ..., "messages": [...]}}
{"id": "a", "prompt": "How do I sort a list?"}            the prompt under any name that question sets have for it

The journal OUT.journal, from which the output is written when all is done:

    {"input", "target_model", ...}                          the first row: a journal of other questions is not resumed
    {"line", "step", "phase", "request", "outcome"}         a completed call, on disk before it is used
    {"line", "row", "kind"}                                 the row of a line, with the kind of its error

A resumed command makes no call again that was answered, and asks those lines again whose failures may pass. Two numbers
per line are all that grows with the file.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from query_mutator.data.loaders import QUESTION_COLUMNS
from query_mutator.env.flow import Call, CallOutcome, CallSite, Flow, Need, map_needs
from query_mutator.env.scheduling import Scheduler
from query_mutator.errors import UsageError
from query_mutator.files import atomic_write, decode_object, encode, parse_json_object
from query_mutator.files.json_lines import JsonLines, scan_json_lines
from query_mutator.llm.coalesce import request_key
from query_mutator.llm.retry import TRANSIENT
from query_mutator.session.play import FailureWindow
from query_mutator.types import ChatRequest, Completion, ErrorInfo, Message, Role

CHAT_URL = "/v1/chat/completions"
_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
#: Sampling settings that Ollama and OpenAI have under the same name.
_OPTIONS = ("top_p", "stop", "presence_penalty", "frequency_penalty")
_READ = {"model", "messages", "max_tokens", "max_completion_tokens", "temperature", "seed", *_OPTIONS}
#: Fields that do not change the answer, and the values of others that ask for nothing special.
_IGNORED = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}
_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "tools": ([],),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
}

AHEAD = 4  # lines in progress for each call in flight: some of them wait before a retry

#: The completion of a line, and what a policy did with its prompt.
Answer = tuple[Completion, dict[str, object] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one line asks; None: as the flags say."""

    number: int  # of the line, from 1
    id: Any
    messages: tuple[Message, ...]
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_openai: bool = False

    @property
    def prompt(self) -> str | None:
        """Return the text of a single user message, None for a conversation."""
        return self.messages[0].content if [message.role for message in self.messages] == ["user"] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """An input file as it is: its checksums and size, and the number of blank lines."""

    path: Path
    sha256: str
    num_bytes: int
    crcs: array[int]  # of the lines
    num_blank: int

    @property
    def num_lines(self) -> int:
        """Return the number of lines."""
        return len(self.crcs)


def scan_input(path: str | Path) -> InputFile:
    """Read a file once; UsageError when it cannot be read or has no line."""
    digest, size, crcs, blank = hashlib.sha256(), 0, array("L"), 0
    for _, line in read_lines(path):
        digest.update(line)
        size += len(line)
        crcs.append(zlib.crc32(line))
        blank += not line.strip()
    if len(crcs) == blank:
        raise UsageError(f"{path} has no lines; give one JSON object per line")
    return InputFile(path=Path(path), sha256=digest.hexdigest(), num_bytes=size, crcs=crcs, num_blank=blank)


def read_again(known: InputFile) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file as it was scanned, without what was appended since; UsageError if it changed."""
    left = known.num_bytes
    for number, line in read_lines(known.path):
        if not left:
            return
        line = line[:left]
        if zlib.crc32(line) != known.crcs[number - 1]:
            break
        left -= len(line)
        yield number, line
    if left:
        raise UsageError(f"{known.path} changed while it was answered; restore it and repeat the command")


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and bytes of each line; UsageError when the file cannot be read."""
    try:
        with Path(path).open("rb") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None


def parse_line(number: int, line: bytes) -> Ask:
    """Return what a line asks; ValueError, without the line's number, for one that asks nothing we can send."""
    row = parse_json_object((line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip())
    names = ("prompt",) if "body" in row else ("prompt", *QUESTION_COLUMNS)
    column = next((name for name in names if name in row), None)
    if column is not None:
        return _from_prompt(number, row, column)
    if "body" not in row:
        known = ", ".join(QUESTION_COLUMNS)
        raise ValueError(f'neither a question ({known}) nor "body"; write {{"query"}} or OpenAI\'s batch format')
    return _from_openai(number, row)


def _from_prompt(number: int, row: Mapping[str, Any], column: str) -> Ask:
    prompt = row[column]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f'"{column}" {"is empty" if isinstance(prompt, str) else "must be text"}')
    message = Message(role="user", content=prompt)
    return Ask(number=number, id=row.get("id", number), messages=(message,), model=_model(row))


def _from_openai(number: int, row: Mapping[str, Any]) -> Ask:
    if (method := row.get("method", "POST")) != "POST" or (url := row.get("url", CHAT_URL)) != CHAT_URL:
        asked = method if method != "POST" else url
        raise ValueError(f"{asked!r} is not supported; lines must be POST {CHAT_URL}")
    body = row["body"]
    if not isinstance(body, dict):
        raise ValueError('"body" must be an object')
    _check_fields(body)
    return Ask(
        number=number,
        id=row.get("custom_id", number),
        messages=_messages(body.get("messages")),
        model=_model(body),
        max_tokens=_whole(body, "max_completion_tokens", "max_tokens"),
        temperature=_number(body, "temperature"),
        seed=_whole(body, "seed"),
        options={name: _option(body[name]) for name in _OPTIONS if body.get(name) is not None},
        is_openai=True,
    )


def _check_fields(body: Mapping[str, Any]) -> None:
    """Raise a ValueError for a field that would change the answer and cannot be sent to every server."""
    for name, value in body.items():
        plain = value is None or name in _READ | _IGNORED or value in _DEFAULTS.get(name, ())
        if not plain:
            raise ValueError(f'"{name}" in the body is not supported; leave it out')


def _messages(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a list of at least one message')
    return tuple(_message(one) for one in messages)


def _message(one: Any) -> Message:
    role, content = (one.get("role"), one.get("content")) if isinstance(one, dict) else (None, None)
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"a message with the role {role!r} is not supported; use system, user or assistant")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise ValueError("the content of a message must be text")
    return Message(role=_ROLES[role], content=content)


def _model(row: Mapping[str, Any]) -> str | None:
    model = row.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        raise ValueError('"model" must be a name')
    return model


def _option(value: Any) -> Any:
    """Return an option as every server takes it: a list of stops, also of one."""
    return [value] if isinstance(value, str) else value


def _whole(body: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = body.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f'"{name}" must be a whole number')
        if value is not None:
            return value
    return None


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool)):
        raise ValueError(f'"{name}" must be a number')
    return value


def answer_row(ask: Ask, completion: Completion, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the row of an answered line; `more` says how its prompt was rewritten."""
    reason = "length" if completion.hit_limit else "stop"
    tokens = {"prompt_tokens": completion.prompt_tokens, "completion_tokens": completion.completion_tokens}
    if not ask.is_openai:
        about = {"model": completion.model, "finish_reason": reason, **tokens}
        return {"id": ask.id, "answer": completion.text, **about, **(more or {})}
    message = {"role": "assistant", "content": completion.text, "refusal": None}
    body = {
        "id": f"chatcmpl-{ask.number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": completion.model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
        "usage": {**tokens, "total_tokens": sum(tokens.values())},
    }
    response = {"status_code": 200, "request_id": f"req_{ask.number}", "body": body}
    row = {"id": f"batch_req_{ask.number}", "custom_id": ask.id, "response": response, "error": None}
    return {**row, **({"query_mutator": dict(more)} if more is not None else {})}


def error_row(ask: Ask, error: ErrorInfo) -> dict[str, Any]:
    """Return the row of a line whose call failed for good."""
    said = {"code": error.kind, "message": error.message}
    if not ask.is_openai:
        return {"line": ask.number, "id": ask.id, "error": said}
    row = {"id": f"batch_req_{ask.number}", "custom_id": ask.id, "response": None, "error": said}
    return {"line": ask.number, **row}


def bad_line_row(number: int, reason: str) -> dict[str, Any]:
    """Return the row of a line that cannot be asked."""
    return {"line": number, "id": None, "error": {"code": "invalid_line", "message": reason}}


class FileJournal:
    """The calls and rows of one output; `find`, `holds` and `write` are for a scheduler."""

    def __init__(self, path: Path, header: Mapping[str, Any], *, num_lines: int) -> None:
        """Open a journal, new or resumed; UsageError for one that was begun with another `header`, or is damaged."""
        self.path = path
        #: by line without a row, step and phase: the sha256 of an answered request, and the answer
        self._known: dict[int, dict[tuple[int, str], tuple[str, CallOutcome]]] = {}
        self._rows_at = array("q", bytes(8 * (num_lines + 1)))  # by line: where its row begins, 0 for none
        self.num_done = self.num_failed = 0
        if path.exists():
            self._read(header)
        self._file = JsonLines(path)
        if not self._file.size_bytes:
            self._file.append(header)

    def is_done(self, line: int) -> bool:
        """Return whether a line was done before this command started."""
        return self._rows_at[line] != 0

    def find(self, site: CallSite, attempt: int, request: ChatRequest) -> CallOutcome | None:
        """Return the answer to a call that an earlier command made, whichever attempt it was."""
        key, outcome = self._known.get(site.env, {}).get((site.step, site.phase), (None, None))
        return outcome if key == request_key(request) else None

    def holds(self, site: CallSite, attempt: int) -> bool:
        """Return False: failed attempts are made again."""
        return False

    def write(self, site: CallSite, attempt: int, request: ChatRequest, outcome: CallOutcome) -> None:
        """Append an answered call and hand it to the operating system."""
        if outcome.completion.ok:
            about = {"line": site.env, "step": site.step, "phase": site.phase, "request": request_key(request)}
            self._file.append({**about, "outcome": outcome.completion.to_json()})

    def add(self, line: int, row: Mapping[str, Any], kind: str | None = None) -> None:
        """Append the row of a line that is done; `kind` is that of its error."""
        self._file.append({"line": line, "row": row, "kind": kind})
        self._known.pop(line, None)
        self.num_done += 1
        self.num_failed += kind is not None

    def write_outputs(self, answers: Path, errors: Path) -> None:
        """Write the rows of all lines in order, those without an answer to a file of their own, and end the journal."""
        self._file.sync()
        self._file.close()
        self._scan(resumes=False)
        if self.num_failed:
            self._write(errors, failed=True)
        else:
            errors.unlink(missing_ok=True)
        self._write(answers, failed=False)
        self.path.unlink()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def _read(self, header: Mapping[str, Any]) -> None:
        """Take the rows and the answered calls of an earlier command."""
        first = next(iter(scan_json_lines(self.path)), None)
        if first is not None and first.value != decode_object(encode(header)):
            raise UsageError(
                f"{self.path} was begun with {_differences(first.value, header)}; repeat that command to resume it, or "
                "remove the file to start again"
            )
        self._scan(resumes=True)

    def _scan(self, *, resumes: bool) -> None:
        """Find the row of each line; with `resumes` take the answered calls of the others."""
        at = 0
        for found in scan_json_lines(self.path):
            entry = found.value
            if "row" in entry:
                self._take_row(entry, at, resumes=resumes)
            elif "outcome" in entry and resumes:
                outcome = CallOutcome(Completion.from_json(entry["outcome"]), 0.0)
                self._known.setdefault(entry["line"], {})[entry["step"], entry["phase"]] = (entry["request"], outcome)
            at = found.end

    def _take_row(self, entry: Mapping[str, Any], at: int, *, resumes: bool) -> None:
        line, kind = entry["line"], entry["kind"]
        if resumes and kind in TRANSIENT:
            return
        self._known.pop(line, None)
        self._rows_at[line] = at
        if resumes:
            self.num_done += 1
            self.num_failed += kind is not None

    def _write(self, path: Path, *, failed: bool) -> None:
        with self.path.open("rb") as journal, atomic_write(path) as file:
            for at in filter(None, self._rows_at):
                journal.seek(at)
                entry = json.loads(journal.readline())  # keeps whole numbers of any size
                if (entry["kind"] is not None) == failed:
                    file.write(encode(entry["row"]) + b"\n")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings that differ, as "input x (now y)"."""
    found = [f"{name} {before.get(name)} (now {value})" for name, value in now.items() if before.get(name) != value]
    return ", ".join(found) or "other settings"


class Shown(Protocol):
    """A progress bar."""

    def update(self) -> object:
        """Count a line."""


def request_of(ask: Ask, *, model: str, max_tokens: int, temperature: float) -> ChatRequest:
    """Return the request of a line; what it leaves open is as given."""
    return ChatRequest(
        model=model,
        messages=ask.messages,
        max_tokens=max_tokens if ask.max_tokens is None else ask.max_tokens,
        temperature=temperature if ask.temperature is None else ask.temperature,
        seed=ask.seed,
        options=ask.options,
    )


def ask_once(ask: Ask, request: ChatRequest, more: dict[str, object] | None = None) -> Flow:
    """Yield the one call of a line; return its Answer."""
    completion = yield Call(request, CallSite(ask.number, 0, "answer"))
    return completion, more


def metered(flow: Flow, tokens: Counter[str]) -> Flow:
    """Yield the needs of a flow and return its result; count the tokens of its calls."""

    def count(need: Need) -> Flow:
        result = yield need
        if isinstance(need, Call):
            tokens.update(prompt_tokens=result.prompt_tokens, completion_tokens=result.completion_tokens)
        return result

    return map_needs(flow, count)


def answer_file(
    known: InputFile,
    journal: FileJournal,
    scheduler: Scheduler,
    start: Callable[[Ask], Flow],
    *,
    failures: FailureWindow,
    shown: Shown,
    on_bad_line: Callable[[int, str], None],
) -> None:
    """Answer all lines of a file that the journal does not have; `start` returns the flow of a line, with its Answer.

    Raises TooManyFailuresError when calls fail too often, and UsageError when the file changes; the command can be
    resumed.
    """
    asks = _asks(known, journal, on_bad_line, shown)
    in_progress: dict[int, Ask] = {}
    while True:
        while len(in_progress) < AHEAD * scheduler.batch_size and (ask := next(asks, None)) is not None:
            in_progress[ask.number] = ask
            scheduler.start(ask.number, start(ask), done=ask.number)
        if not in_progress:
            return
        number, (completion, more) = scheduler.finished()
        assert isinstance(number, int)
        _finish(journal, in_progress.pop(number), completion, more)
        failures.add(np.array([completion.ok]))
        shown.update()


def _finish(journal: FileJournal, ask: Ask, completion: Completion, more: dict[str, object] | None) -> None:
    error = completion.error
    if error is None:
        journal.add(ask.number, answer_row(ask, completion, more))
    elif error.kind != "cancelled":
        journal.add(ask.number, error_row(ask, error), error.kind)


def _asks(
    known: InputFile, journal: FileJournal, on_bad_line: Callable[[int, str], None], shown: Shown
) -> Iterator[Ask]:
    """Yield what the lines ask that are not done; lines that ask nothing are done at once."""
    for number, line in read_again(known):
        if not line.strip() or journal.is_done(number):
            continue
        try:
            ask = parse_line(number, line)
        except ValueError as error:
            on_bad_line(number, str(error))
            journal.add(number, bad_line_row(number, str(error)), "invalid_line")
            shown.update()
            continue
        yield ask
