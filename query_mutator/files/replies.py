"""A model's replies in a file: xz-compressed JSON lines that map the keys of requests to replies.

    {"format": "query_mutator/replies/1", "model": "small", "model_sha256": "…", "rows": 1, …}
    ["0123456789abcdef", "Paris.", 41, 3, 0.0121, 0.034, -0.2131, "stop"]

A row is a key, the text, the tokens of prompt and reply, the seconds for both, the mean log probability of the reply's
tokens or null, and how the reply ended: one of ENDS. A row may end with the log probability of each token in
thousandths, from 0 down. Rows with the same key are samples of one request, in their order.
`reply_key` says which requests are the same.
"""

from __future__ import annotations

import functools
import itertools
import lzma
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.files import atomic_write, decode, decode_object, encode, file_sha256, record_of
from query_mutator.types import ChatRequest, Completion, ErrorInfo, wire_number, wire_text

FORMAT = "query_mutator/replies/1"
ENDS = ("stop", "length", "empty")  # where the model ended it, at the token limit, without text
_MAX_BYTES = 256 * 2**20  # unpacked
_XZ_MEMORY_BYTES = 64 * 2**20
_MAX_SAMPLES = 10_000  # of one request: each seed has an order of them
_DIGITS = 4  # of times and log probabilities
_THOUSANDTHS = 1000
_KEY_BYTES = 8
#: Fields of a request besides model, messages, max_tokens and temperature that are in its key where they are set.
_OPTIONAL = ("options", "json_schema")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepliesHead:
    """Origin of the replies in a file."""

    model: str  # the name that requests have
    model_sha256: str  # of the model's file, "" if it is not known
    made_with: str  # library and version
    command: str
    date: str  # of the last reply, as 2026-11-23
    max_tokens: int = 0  # of replies to questions, 0 if it is not known
    operators: tuple[str, ...] = ()  # whose rewrites by the model are recorded, with the answers to them
    rows: int = 0
    format: str = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"its format is {self.format[:60]!r}, not {FORMAT!r}")


def write_replies(path: str | Path, head: RepliesHead, replies: Mapping[str, Sequence[Completion]]) -> None:
    """Write replies by key, the samples of each in order; the same replies give the same bytes."""
    rows = [_row(key, reply) for key, samples in replies.items() for reply in samples]
    with atomic_write(path) as file, lzma.open(file, "wb", preset=lzma.PRESET_DEFAULT | lzma.PRESET_EXTREME) as packed:
        for line in (asdict(head) | {"rows": len(rows)}, *rows):
            packed.write(encode(line) + b"\n")


def _row(key: str, reply: Completion) -> list[object]:
    end = "empty" if reply.error is not None else "length" if reply.hit_limit else "stop"
    times = [round(seconds, _DIGITS) for seconds in (reply.prompt_eval_s, reply.eval_s)]
    logprob = None if reply.logprob is None else round(reply.logprob, _DIGITS)
    row: list[object] = [key, reply.text, reply.prompt_tokens, reply.completion_tokens, *times, logprob, end]
    tokens = [round(_THOUSANDTHS * one) for one in reply.token_logprobs]
    return [*row, tokens] if tokens else row


def read_replies(path: str | Path) -> tuple[RepliesHead, dict[str, tuple[Completion, ...]]]:
    """Return the head of a file and its replies by key; UsageError for a file that is damaged or of another kind."""
    replies: dict[str, list[Completion]] = {}
    number = 1
    try:
        first, *lines = _unpacked(Path(path)).split(b"\n")
        head = record_of(RepliesHead, decode_object(first), where="its first line")
        if len(lines) != head.rows:
            raise ValueError(f"it has not the {head.rows:,} replies that its first line announces")
        for number, line in enumerate(lines, 2):  # noqa: B007, named in errors
            key, reply = _reply(line, head.model)
            replies.setdefault(key, []).append(reply)
            if len(replies[key]) > _MAX_SAMPLES:
                raise ValueError(f"more than {_MAX_SAMPLES:,} replies to one request")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, OverflowError, lzma.LZMAError) as error:
        advice = "damaged, or not a file of recorded replies: restore it"
        raise UsageError(f"{path}: line {number}: {error}; {advice}") from None
    return head, {key: tuple(samples) for key, samples in replies.items()}


def _unpacked(path: Path) -> bytes:
    """Return the content of an xz file without the last line's end; an endless one or one with more is a ValueError."""
    unpacking = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)
    with path.open("rb") as file:
        text = unpacking.decompress(file.read(_MAX_BYTES), _MAX_BYTES)
    if not unpacking.eof or unpacking.unused_data or not text.endswith(b"\n"):
        raise ValueError("it is too large, or does not end with a line")
    return text[:-1]


def _reply(line: bytes, model: str) -> tuple[str, Completion]:
    """Return the key and the reply of a row; ValueError or TypeError for any other line."""
    key, text, prompt_tokens, tokens, prompt_eval_s, eval_s, logprob, end, *rest = decode(line)
    each = rest[0] if rest else []
    if not isinstance(key, str) or end not in ENDS or (end == "empty") != (not text):
        raise ValueError("a reply without a key, or that ends in no known way")
    if not -math.inf < (logprob or 0) <= 0 or max(each, default=0) > 0:
        raise ValueError("a log probability above 0")
    times = wire_number(prompt_eval_s), wire_number(eval_s)
    return key, Completion(
        text=wire_text(text),
        model=model,
        error=ErrorInfo(kind="empty", message="the reply has no text") if end == "empty" else None,
        prompt_tokens=int(wire_number(prompt_tokens)),
        completion_tokens=int(wire_number(tokens)),
        total_s=sum(times),
        prompt_eval_s=times[0],
        eval_s=times[1],
        hit_limit=end == "length",
        logprob=None if logprob is None else float(logprob),
        token_logprobs=tuple(one / _THOUSANDTHS for one in each),
    )


def reply_key(request: ChatRequest) -> str:
    """Return 16 hexadecimal digits of what decides a reply: not of seed, sample, attempt and purpose."""
    messages = [[message.role, message.content] for message in request.messages]
    said: list[Any] = [request.model, messages, request.max_tokens, float(request.temperature)]
    optional = {name: value for name in _OPTIONAL if (value := getattr(request, name))}
    if optional:
        said.append(optional)
    return blake2b(encode(said, sort_keys=True), digest_size=_KEY_BYTES).hexdigest()


class Recording:
    """The replies of a file by request. UsageError for a file that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path, self.sha256 = path, file_sha256(path)
        self.head: RepliesHead
        self.head, self._replies = read_replies(path)

    def __iter__(self) -> Iterator[Completion]:
        return itertools.chain.from_iterable(self._replies.values())

    def find(self, request: ChatRequest) -> Completion | None:
        """Return the recorded reply, None for a request that is not there.

        A request with a higher token limit than the recording gets the recorded reply, which may be cut. The seed of
        the request permutes the samples, so that each seed meets other random replies.
        """
        key = reply_key(request)
        if key not in self._replies and 0 < self.head.max_tokens < request.max_tokens:
            key = reply_key(replace(request, max_tokens=self.head.max_tokens))
        samples = self._replies.get(key, ())
        if request.temperature == 0:
            return samples[0] if samples else None
        number = request.sample or 0
        return samples[_order(request.seed or 0, key, len(samples))[number]] if number < len(samples) else None


@functools.lru_cache(maxsize=2**16)
def _order(seed: int, key: str, count: int) -> tuple[int, ...]:
    """Return a permutation of `count` samples that depends on the seed and the request."""
    return tuple(sorted(range(count), key=lambda number: blake2b(f"{seed} {key} {number}".encode()).digest()))
