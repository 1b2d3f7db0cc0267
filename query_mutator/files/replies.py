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
import re
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
MAX_ROWS = 10**6
_MAX_BYTES = 256 * 2**20  # unpacked
_MAX_LINE_BYTES = 2**20
_PIECE_BYTES = 2**18
_XZ_MEMORY_BYTES = 64 * 2**20
_KEY = re.compile(r"[0-9a-f]{8,64}")
_DIGITS = 4  # of times and log probabilities
_THOUSANDTHS = 1000
_KEY_BYTES = 8
#: Fields of a request besides model, messages, max_tokens and temperature that are in its key where they are set.
_OPTIONAL = ("options", "json_schema", "think", "choices")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepliesHead:
    """Where the replies of a file come from."""

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
        if not 0 <= self.rows <= MAX_ROWS:
            raise ValueError(f"{self.rows:,} replies, of at most {MAX_ROWS:,}")


def write_replies(path: str | Path, head: RepliesHead, replies: Mapping[str, Sequence[Completion]]) -> None:
    """Write replies by key, the samples of each in order; the same replies give the same bytes."""
    rows = [(key, reply) for key, samples in replies.items() for reply in samples]
    with atomic_write(path) as file, lzma.open(file, "wb", preset=lzma.PRESET_DEFAULT | lzma.PRESET_EXTREME) as packed:
        packed.write(encode(asdict(head) | {"rows": len(rows)}) + b"\n")
        for key, reply in rows:
            packed.write(encode(_row(key, reply)) + b"\n")


def read_replies(path: str | Path) -> tuple[RepliesHead, dict[str, tuple[Completion, ...]]]:
    """Return the head of a file and its replies by key; UsageError for a file that is damaged or of another kind."""
    replies: dict[str, tuple[Completion, ...]] = {}
    lines = _lines(Path(path))
    count = 0
    try:
        head = record_of(RepliesHead, decode_object(next(lines, b"")), where="its first line")
        for count, line in enumerate(lines, 1):
            if count > head.rows:
                break
            key, reply = _reply(line, head.model)
            replies[key] = (*replies.get(key, ()), reply)
        if count != head.rows:
            raise ValueError(f"it has not the {head.rows:,} replies that its first line announces")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, lzma.LZMAError) as error:
        where = f"line {count + 1}: " if count else ""
        raise UsageError(f"{path}: {where}{error}; damaged, or not a file of recorded replies: restore it") from None
    return head, replies


def _row(key: str, reply: Completion) -> list[object]:
    end = "empty" if reply.error is not None else "length" if reply.hit_limit else "stop"
    times = [round(seconds, _DIGITS) for seconds in (reply.prompt_eval_s, reply.eval_s)]
    logprob = None if reply.logprob is None else round(reply.logprob, _DIGITS)
    row: list[object] = [key, reply.text, reply.prompt_tokens, reply.completion_tokens, *times, logprob, end]
    tokens = [round(_THOUSANDTHS * one) for one in reply.token_logprobs]
    return [*row, tokens] if tokens else row


def _reply(line: bytes, model: str) -> tuple[str, Completion]:
    """Return the key and the reply of a row; ValueError or TypeError for any other line."""
    key, text, prompt_tokens, tokens, prompt_eval_s, eval_s, logprob, end, *rest = decode(line)
    if not (isinstance(key, str) and _KEY.fullmatch(key)):
        raise ValueError("a key that is not hexadecimal digits")
    if end not in ENDS or (end == "empty") != (not text):
        raise ValueError("a reply that ends in no known way")
    if logprob is not None and not (isinstance(logprob, (int, float)) and -math.inf < logprob <= 0):
        raise ValueError("a log probability above 0")
    each = rest[0] if rest else []
    if len(rest) > 1 or not (isinstance(each, list) and all(isinstance(one, int) and one <= 0 for one in each)):
        raise ValueError("log probabilities of tokens that are not whole numbers from 0 down")
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


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of an xz file, unpacked piece by piece; ValueError or LZMAError for a damaged or endless one."""
    unpacking = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)
    rest, size = b"", 0
    with path.open("rb") as file:
        while not unpacking.eof:
            packed = file.read(_PIECE_BYTES) if unpacking.needs_input else b""
            if unpacking.needs_input and not packed:
                raise ValueError("it ends early")
            piece = unpacking.decompress(packed, _PIECE_BYTES)
            size += len(piece)
            *whole, rest = (rest + piece).split(b"\n")
            if size > _MAX_BYTES or len(rest) > _MAX_LINE_BYTES:
                raise ValueError("it is too large")
            yield from whole
        if rest or unpacking.unused_data or file.read(1):
            raise ValueError("it does not end with a line")


def reply_key(request: ChatRequest) -> str:
    """Return 16 hexadecimal digits of what decides a reply: not of seed, sample, attempt and purpose."""
    messages = [[message.role, message.content] for message in request.messages]
    said: list[Any] = [request.model, messages, request.max_tokens, float(request.temperature)]
    optional = {name: value for name in _OPTIONAL if (value := getattr(request, name))}
    if optional:
        said.append(_sorted(optional))
    return blake2b(encode(said), digest_size=_KEY_BYTES).hexdigest()


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, (list, tuple)) else value


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
