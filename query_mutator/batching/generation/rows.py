"""From rows of a JSONL file to token ids: a row by number or by id is read by one seek; errors name file and line.

{"input_ids": [..], "loss_mask": [..]}            unchanged (without a mask: all ones)
{"messages": [{"role": .., "content": ..}, ..]}   the tokenizer's chat template, or headed paragraphs
{"instruction": .., "input": .., "response": ..}  headed paragraphs; `prompt`/`completion` mean the same
{"text": ..} or {"content": ..} or {"input": ..}  every token has a loss
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from query_mutator.batching.files import reading
from query_mutator.batching.generation.length_cache import sample_id_of
from query_mutator.errors import DatasetError, UsageError, reason_of
from query_mutator.files import decode_object, parse_json
from query_mutator.files.gguf_file import source_of

TEXT_KEYS = ("text", "content", "input")
PAIR_KEYS = (("instruction", "response"), ("instruction", "output"), ("prompt", "completion"))
# Template of a pair's first half; a model trained on pairs must be prompted with it.
INSTRUCTION_PROMPT = "### Instruction:\n{instruction}\n\n### Response:\n"
PROBE = "a"
HASH_LENGTH = 16


class Tokenizer(Protocol):
    """Anything that turns text into token ids; `eos_token_id` and `chat_template` are used if they exist."""

    def encode(self, text: str) -> Any:
        """Return the ids, or an object with `.ids` (as the `tokenizers` library does)."""
        ...


class TokenRow(NamedTuple):
    """Token ids int32 [L] and loss mask uint8 [L] (1 = has a loss) of one row."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]

    @classmethod
    def of(cls, sample: Any) -> Self:
        """Return ids and mask of a mapping, Sample or StreamSample; without a mask all tokens have a loss.

        Raises UsageError for what is not at least one id and as many zeros and ones.
        """
        if isinstance(sample, cls):
            return sample
        if not isinstance(sample, Mapping):
            sample = {"input_ids": sample.input_ids, "loss_mask": sample.loss_mask}
        ids = np.asarray(sample["input_ids"])
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
            raise UsageError("input_ids must be a list of at least one token id")
        mask = np.asarray(sample["loss_mask"] if "loss_mask" in sample else np.ones(len(ids), np.uint8))
        if mask.shape != ids.shape or not np.isin(mask, (0, 1)).all():
            raise UsageError(f"loss_mask must be a list of {len(ids)} zeros and ones, one per token")
        if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
            raise UsageError("a token id is out of range")
        return cls(ids.astype(np.int32, copy=False), mask.astype(np.uint8, copy=False))

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.input_ids)

    def cut(self, length: int) -> Self:
        """Return the first `length` tokens."""
        if self.length <= length:
            return self
        return self._replace(input_ids=self.input_ids[:length], loss_mask=self.loss_mask[:length])


class ByteTokenizer:
    """One token per byte of UTF-8; 256 is the end of text, 257 padding."""

    eos_token_id = 256
    pad_token_id = 257

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text."""
        return list(text.encode())

    def __len__(self) -> int:
        return 258


def load_tokenizer(spec: str) -> Any:
    """Return the tokenizer of a folder or hub id, or `ByteTokenizer` for `bytes`; raise UsageError if none loads."""
    if spec == "bytes":
        return ByteTokenizer()
    from transformers import AutoTokenizer

    source, of_gguf = source_of(spec)
    try:
        return AutoTokenizer.from_pretrained(source, **of_gguf, trust_remote_code=False)
    except Exception as error:  # each reader of tokenizer files fails in its own way
        what = (
            "the folder has no loadable tokenizer" if Path(spec).is_dir() else "not a folder, not loadable from the hub"
        )
        reason = reason_of(error)
        raise UsageError(
            f"tokenizer {spec!r}: {what} ({reason}); give a folder, a hub id, or bytes (one token per byte)"
        ) from None


def pad_id_of(tokenizer: Any) -> int:
    """Return the padding id: the tokenizer's, else its end-of-text id, else 0 (padding is masked)."""
    for name in ("pad_token_id", "eos_token_id"):
        found = getattr(tokenizer, name, None)
        if found is not None:
            return int(found)
    return 0


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return 16 hex digits that change with anything that changes a tokenizer's token ids."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    parts = [backend.to_str()] if hasattr(backend, "to_str") else []
    if not parts and hasattr(tokenizer, "get_vocab"):
        parts = [json.dumps(tokenizer.get_vocab(), sort_keys=True)]
    if not parts:  # an opaque tokenizer: hash its output for some texts
        parts = [repr(_ids(tokenizer.encode(text))) for text in ("The quick brown fox, 0123456789.", "äöü \n\t {}", "")]
    parts += [str(getattr(tokenizer, name, None)) for name in ("bos_token_id", "eos_token_id", "chat_template")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:HASH_LENGTH]


def _ids(encoded: Any) -> list[int]:
    return list(getattr(encoded, "ids", encoded))


class RowTokenizer:
    """Turn rows into tokens; the tokenizer's special tokens around a text occur once, around the whole row."""

    def __init__(self, tokenizer: Tokenizer | None, *, mask_prompt: bool = True) -> None:
        self.tokenizer: Any = tokenizer
        self.mask_prompt = mask_prompt
        self.eos: int | None = getattr(tokenizer, "eos_token_id", None)
        self._encode: Callable[[str], list[int]] | None = None
        self._before: list[int] = []
        self._after: list[int] = []
        if tokenizer is not None:
            self._learn_specials()

    def _learn_specials(self) -> None:
        # Compare a probe with and without special tokens: what surrounds it are the special tokens.
        full = _ids(self.tokenizer.encode(PROBE))
        try:
            bare = _ids(self.tokenizer.encode(PROBE, add_special_tokens=False))
            self._encode = lambda text: _ids(self.tokenizer.encode(text, add_special_tokens=False))
        except TypeError:  # a plain encode(text): its ids for "" precede every text
            before = _ids(self.tokenizer.encode(""))
            bare = full[len(before) :]
            self._encode = lambda text: _ids(self.tokenizer.encode(text))[len(before) :]
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                self._before, self._after = full[:start], full[start + len(bare) :]
                return

    def tokens(self, row: Mapping[str, Any]) -> TokenRow:
        """Return the tokens of a row; raise ValueError if it has none."""
        if "input_ids" in row:
            return TokenRow.of(row)
        if "messages" in row:
            return self._from_parts(self._message_parts(row["messages"]))
        parts = self._pair_parts(row)
        if parts is None:
            text = next((row[key] for key in TEXT_KEYS if row.get(key)), None)
            if not isinstance(text, str):
                raise ValueError(f"no text in the row; its keys are {', '.join(row) or 'none'}")
            parts = [(text, True)]
        return self._from_parts(parts)

    def pair(self, prompt: str, answer: str) -> TokenRow:
        """Return the tokens of a prompt, without loss, and its answer, with loss."""
        return self._from_parts([(prompt, False), (answer, True)])

    def _pair_parts(self, row: Mapping[str, Any]) -> list[tuple[str, bool]] | None:
        """Return prompt and answer as parts (text, has loss), or None if the row is not such a pair."""
        for asked, answered in PAIR_KEYS:
            if asked not in row or answered not in row:
                continue
            prompt, answer = row[asked], row[answered]
            if not (isinstance(prompt, str) and isinstance(answer, str) and answer):
                raise ValueError(f"{asked} and {answered} must be texts, {answered} not empty")
            if isinstance(row.get("input"), str) and row["input"]:
                prompt = f"{prompt}\n\n{row['input']}"
            return [(INSTRUCTION_PROMPT.replace("{instruction}", prompt), False), (answer, True)]
        return None

    def _message_parts(self, messages: Any) -> list[tuple[str, bool]]:
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list of at least one message")
        if not all(isinstance(item, dict) and isinstance(item.get("content"), str) for item in messages):
            raise ValueError("every message needs a role and a content that is text")
        if getattr(self.tokenizer, "chat_template", None):
            return self._template_parts(messages)
        parts = []
        for item in messages:
            parts.append((f"### {str(item.get('role', 'user')).capitalize()}:\n", False))
            parts.append((f"{item['content']}\n\n", item.get("role") == "assistant"))
        return parts

    def _template_parts(self, messages: list[dict[str, str]]) -> list[tuple[str, bool]]:
        """Split the chat template's text where assistant messages begin and end."""
        # The template of the first k messages must begin with that of the first k-1; the rest belongs to message k.
        parts, done = [], ""
        for number, item in enumerate(messages, start=1):
            if item.get("role") == "assistant":
                opened = self._template(messages[: number - 1], add_generation_prompt=True)
                if opened.startswith(done):
                    parts.append((opened[len(done) :], False))
                    done = opened
            text = self._template(messages[:number])
            if not text.startswith(done):
                raise ValueError("the chat template rewrites earlier messages; prompts cannot be masked")
            parts.append((text[len(done) :], item.get("role") == "assistant"))
            done = text
        return parts

    def _template(self, messages: list[dict[str, str]], **options: Any) -> str:
        if not messages:
            return ""
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # a template is a program of the tokenizer's author and may raise anything
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def _from_parts(self, parts: list[tuple[str, bool]]) -> TokenRow:
        if self._encode is None:
            raise ValueError("the row has text; give a tokenizer")
        ids, mask = list(self._before), [0] * len(self._before)
        for text, learned in parts:
            piece = self._encode(text)
            ids += piece
            mask += [int(learned or not self.mask_prompt)] * len(piece)
        if len(ids) == len(self._before):
            raise ValueError("the text has no tokens")
        end = self._after or ([] if self.eos is None or ids[-1] == self.eos else [self.eos])
        ids += end
        mask += [int(parts[-1][1] or not self.mask_prompt)] * len(end)
        if not any(mask):
            raise ValueError("no token has a loss")
        return TokenRow(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8))


# --- rows of a file --------------------------------------------------------------------------------------------------


class JsonlIndex:
    """Byte offsets of the rows of a JSONL file: any row is read by one seek; 16 bytes per row in memory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        begins, lines, position = [], [], 0
        with reading(path), self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    begins.append(position)
                    lines.append(number)
                position += len(line)
        self.begins = np.array(begins, dtype=np.int64)  # [rows]
        self.lines = np.array(lines, dtype=np.int64)  # [rows], from 1

    def __len__(self) -> int:
        return len(self.begins)

    def rows(self, order: NDArray[np.int64] | None = None, *, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield row number and raw line, in the file's order or in `order`, from position `start`."""
        numbers = np.arange(len(self)) if order is None else order
        with self.path.open("rb") as file:
            for number in numbers[start:].tolist():
                file.seek(int(self.begins[number]))
                yield number, file.readline()

    def where(self, number: int) -> str:
        """Return `file:line` of a row."""
        return f"{self.path}:{int(self.lines[number])}"


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """Return the object of one line; raise DatasetError, prefixed with `where`, for any other line."""
    try:
        return decode_object(line, parse_json)
    except ValueError as error:
        raise DatasetError(f"{where}: {error}") from error


@contextmanager
def row_errors(where: str) -> Iterator[None]:
    """Turn whatever the content of a row raises into a DatasetError that begins with `where`."""
    try:
        yield
    except DatasetError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        raise DatasetError(f"{where}: {'.'.join(map(str, first['loc']))} {first['msg']}".strip()) from error
    except (ValueError, TypeError, OverflowError) as error:
        raise DatasetError(f"{where}: {error}") from error


def row_id(row: Mapping[str, Any], number: int, *, dataset_id: str) -> str:
    """Return the id of a row (0 is valid), else the data set's name and the row's number.

    The id is `sample_id` or `id`, or `sample_id` in `meta`, where `save_samples` writes it.
    """
    meta = row.get("meta")
    for source, key in ((row, "sample_id"), (row, "id"), (meta if isinstance(meta, dict) else {}, "sample_id")):
        if source.get(key) is not None:
            return sample_id_of(source[key])
    return f"{dataset_id}_{number:06d}"


class JsonlSamples(Mapping[str, TokenRow]):
    """Rows of a JSONL file by sample id, tokenized on access, so that a BatchWriter holds few in memory.

    `skip_bad` leaves out rows without tokens and counts them in `bad_rows`.
    """

    def __init__(
        self, path: str | Path, tokenizer: Tokenizer | None, *, mask_prompt: bool = True, skip_bad: bool = False
    ) -> None:
        self.index = JsonlIndex(path)
        self.rows = RowTokenizer(tokenizer, mask_prompt=mask_prompt)
        self.skip_bad = skip_bad
        self.bad_rows = 0
        self.first_errors: list[str] = []
        self.on_read: Callable[[], object] | None = None  # called for each row read, for a progress bar
        self._numbers: dict[str, int] = {}
        for number, line in self.index.rows():
            self._note(number, line)
        self._file = self.index.path.open("rb")

    def _note(self, number: int, line: bytes) -> None:
        where = self.index.where(number)
        try:
            with row_errors(where):
                name = row_id(parse_row(line, where), number, dataset_id=self.index.path.stem)
            if name in self._numbers:
                raise DatasetError(f"{where}: sample id {name!r} occurs twice")
        except DatasetError as error:
            self._bad(error)
            return
        self._numbers[name] = number

    def _bad(self, error: DatasetError) -> None:
        if not self.skip_bad:
            raise error
        self.bad_rows += 1
        if len(self.first_errors) < 10:
            self.first_errors.append(str(error))

    def row(self, sample_id: str) -> dict[str, Any]:
        """Return the row of a sample in the file."""
        number = self._numbers[sample_id]
        self._file.seek(int(self.index.begins[number]))
        return parse_row(self._file.readline(), self.index.where(number))

    def __getitem__(self, sample_id: str) -> TokenRow:
        where = self.index.where(self._numbers[sample_id])
        if self.on_read is not None:
            self.on_read()
        with row_errors(where):
            return self.rows.tokens(self.row(sample_id))

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def lengths(self) -> dict[str, int]:
        """Return the length of every row by id; see `tokenized` for rows without tokens."""
        return {name: row.length for name, row in self.tokenized()}

    def tokenized(self) -> Iterator[tuple[str, TokenRow]]:
        """Yield id and tokens of every row; rows without tokens are errors, or counted and removed with `skip_bad`."""
        for name in list(self._numbers):
            try:
                row = self[name]
            except DatasetError as error:
                self._bad(error)
                del self._numbers[name]
            else:
                yield name, row

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()
