"""From rows of a JSONL file to token ids.

    {"input_ids": [..], "loss_mask": [..]}            unchanged (without a mask: all ones)
    {"messages": [{"role": .., "content": ..}, ..]}   the tokenizer's chat template, or headed paragraphs
    {"instruction": .., "input": .., "response": ..}  headed paragraphs; `prompt`/`completion` mean the same
    {"text": ..} or {"content": ..} or {"input": ..}  every token has a loss

A row without tokens is a ValueError; `jsonl` names its file and line, or counts it with `skip_bad`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

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

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.input_ids)


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
            return self._ready(row)
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

    def _ready(self, row: Mapping[str, Any]) -> TokenRow:
        ids = np.asarray(row["input_ids"])
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
            raise ValueError("input_ids must be a list of at least one token id")
        mask = np.asarray(row.get("loss_mask", np.ones(len(ids), dtype=np.uint8)))
        if mask.shape != ids.shape or not np.isin(mask, (0, 1)).all():
            raise ValueError(f"loss_mask must be a list of {len(ids)} zeros and ones, one per token")
        if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
            raise ValueError("a token id is out of range")
        return TokenRow(ids.astype(np.int32), mask.astype(np.uint8))

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
