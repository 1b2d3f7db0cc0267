"""Language models in this process: `hf:FOLDER` (or a hub id) in place of a mutator model's name.

Waiting requests are batched. A folder of `qm train sft` stores the prompt of its training in query_mutator.json; a
rewriter then gets the question alone, without the operator's prompt around it. torch and transformers are imported when
a model is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError, reason_of
from query_mutator.files import file_sha256
from query_mutator.llm.client import Backend, BackendWrapper
from query_mutator.types import PROMPT_FILE, ChatRequest, Completion

__all__ = ["PREFIX", "HfModel", "LocalModels", "is_local", "local_models", "model_folder", "training_prompt"]

PREFIX = "hf:"
MAX_BATCH = 16
TEMPLATE_S = 20.0  # for which a chat template may work on a short question
_QUESTION = re.compile(r"<question>\s*(.*?)\s*</question>", re.DOTALL)
_HASHED = ("*.safetensors", "*.bin", "*.json")


def is_local(model: str | None) -> bool:
    """Return whether a name means a model in this process."""
    return model is not None and model.startswith(PREFIX)


def local_models(*names: str | None, deterministic: bool = False) -> tuple[HfModel, ...]:
    """Return a loaded model for each distinct `hf:` name among these."""
    wanted = dict.fromkeys(name for name in names if name is not None and is_local(name))
    return tuple(HfModel(name, max_batch=1 if deterministic else MAX_BATCH) for name in wanted)


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A request that waits for its reply."""

    request: ChatRequest
    ids: list[int]
    started: float
    reply: Future[Completion] = field(default_factory=Future)

    @property
    def sampling(self) -> tuple[int, float, int | None, tuple[str, ...]]:
        """Return what requests of one batch have in common."""
        return self.request.max_tokens, self.request.temperature, self.request.seed, self.stops

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the texts before which a reply ends."""
        found = self.request.options.get("stop") or ()
        return (found,) if isinstance(found, str) else tuple(map(str, found))


class HfModel:
    """A client for one model; greedy unless a request has a temperature, in which case it is not batched.

    A batched matrix product differs from single rows in the last bits: `max_batch=1` makes replies independent of other
    requests.
    """

    def __init__(self, name: str, *, max_batch: int = MAX_BATCH, device: str = "auto") -> None:
        self.name = name
        self._max_batch = max_batch
        folder = model_folder(name)
        self._tokenizer, self._model = _load(folder, device)
        _check_template(self._tokenizer, name)
        self._template = training_prompt(folder)
        self.digest = _digest(folder)
        self._prefix_ids = _prefix_ids(self._tokenizer)
        self._pending: deque[_Pending] = deque()
        self._changed = threading.Condition()  # guards `_pending` and `_closed`
        self._closed = False
        self._owner = os.getpid()
        ends = getattr(self._model.generation_config, "eos_token_id", None)  # a turn may end before the tokenizer's end
        ends = ends if isinstance(ends, list) else [ends]
        self._ends = [int(one) for one in dict.fromkeys([*ends, self._tokenizer.eos_token_id]) if one is not None]
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Hf({self.name!r})"

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply, in the order of arrival; a failed call is a Completion with an error."""
        if os.getpid() != self._owner:  # its thread is not in a fork
            return Completion.failed("request", f"{self.name} was loaded before a fork; load it in each process")
        pending = _Pending(request, self._prompt_ids(request), time.perf_counter())
        if self._max_new_tokens(pending) < 1:
            message = (
                f"a prompt of {len(pending.ids)} tokens does not fit {self.name}; use a model with a larger context"
            )
            return Completion.failed("prompt_too_long", message)
        with self._changed:
            if self._closed:
                return Completion.failed("cancelled", f"{self.name} was closed")
            self._pending.append(pending)
            self._changed.notify()
        return pending.reply.result()

    def close(self) -> None:
        """Cancel waiting requests and stop the thread; idempotent."""
        with self._changed:
            self._closed = True
            cancelled, self._pending = self._pending, deque()
            self._changed.notify()
        for one in cancelled:
            one.reply.set_result(Completion.failed("cancelled", f"{self.name} was closed"))

    # --- prompts ---------------------------------------------------------------------------------------------------

    def _prompt_ids(self, request: ChatRequest) -> list[int]:
        text = request.messages[-1].content
        if self._template is not None:
            found = _QUESTION.search(text) if self._template.get("asks") == "question" else None
            text = str(self._template["prompt"]).replace("{instruction}", found[1] if found else text)
        elif getattr(self._tokenizer, "chat_template", None):
            messages = [{"role": one.role, "content": one.content} for one in request.messages]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        else:
            text = "\n\n".join(message.content for message in request.messages)
        return [*self._prefix_ids, *self._tokenizer.encode(text, add_special_tokens=False)]

    def _max_new_tokens(self, pending: _Pending) -> int:
        """Return how many tokens the reply may have within the model's context."""
        limit = getattr(self._model.config, "max_position_embeddings", None)
        wanted = pending.request.max_tokens
        return wanted if limit is None else min(wanted, limit - len(pending.ids))

    # --- the thread that runs the model ----------------------------------------------------------------------------

    def _serve(self) -> None:
        while batch := self._next_batch():
            try:
                texts = self._generate(batch)
            except Exception as error:  # out of memory, or anything that a model's own code raises
                reason = reason_of(error)
                for one in batch:
                    one.reply.set_result(Completion.failed("server", reason, model=self.name))
                continue
            for one, (text, count) in zip(batch, texts, strict=True):
                one.reply.set_result(self._completion(one, text, count))

    def _next_batch(self) -> list[_Pending]:
        """Wait for requests and return the first with those that can be batched with it; empty when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closed)
            if not self._pending:
                return []
            first = self._pending[0]
            size = 1 if first.request.temperature else self._max_batch
            kind = (first.sampling, self._max_new_tokens(first))  # one limit: no reply is cut at that of another
            batch = [one for one in self._pending if (one.sampling, self._max_new_tokens(one)) == kind][:size]
            self._pending = deque(one for one in self._pending if one not in batch)
            return batch

    def _generate(self, batch: Sequence[_Pending]) -> list[tuple[str, int]]:
        """Return the text and number of tokens of each reply."""
        import torch

        # Left padding: the last position of every row is the end of its prompt.
        longest = max(len(one.ids) for one in batch)
        pad = self._pad_id()
        ids = torch.tensor([[pad] * (longest - len(one.ids)) + one.ids for one in batch], device=self._model.device)
        mask = torch.tensor([[0] * (longest - len(one.ids)) + [1] * len(one.ids) for one in batch])
        request = batch[0].request
        sampling: dict[str, Any] = {"do_sample": bool(request.temperature)}
        with torch.inference_mode(), torch.random.fork_rng(enabled=bool(request.temperature)):
            if batch[0].stops:
                sampling["stopping_criteria"] = [self._stopping(batch[0].stops, longest)]
            if request.temperature:
                sampling["temperature"] = request.temperature
                torch.manual_seed(request.seed or 0)
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask.to(self._model.device),
                max_new_tokens=self._max_new_tokens(batch[0]),
                pad_token_id=pad,
                eos_token_id=self._ends or None,
                **sampling,
            )
        return [self._text(row, batch[0].stops) for row in out[:, longest:].tolist()]

    def _stopping(self, stops: Sequence[str], start: int) -> Callable[..., Any]:
        """Return which rows have a stop after `start`; that of transformers also reads the end of the prompt."""
        import torch

        def stopped(ids: Any, scores: Any, **_: Any) -> Any:
            texts = (str(self._tokenizer.decode(row)) for row in ids[:, start:].tolist())
            return torch.tensor([any(stop in text for stop in stops) for text in texts], device=ids.device)

        return stopped

    def _pad_id(self) -> int:
        for found in (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id):
            if found is not None:
                return int(found)
        return 0

    def _text(self, ids: list[int], stops: Sequence[str]) -> tuple[str, int]:
        ids = list(itertools.takewhile(lambda token: token not in self._ends, ids))
        while stops and ids and ids[-1] == self._pad_id():  # of a row that stopped before others
            ids = ids[:-1]
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        for stop in stops:
            text = text.partition(stop)[0]
        return text.strip(), len(ids)

    def _completion(self, one: _Pending, text: str, count: int) -> Completion:
        taken_s = time.perf_counter() - one.started
        fields: dict[str, Any] = {"model": self.name, "prompt_tokens": len(one.ids), "completion_tokens": count}
        fields |= {"total_s": taken_s, "latency_s": taken_s, "hit_limit": count >= self._max_new_tokens(one)}
        if not text:
            return Completion.failed("empty", "the reply has no text", **fields)
        return Completion(text=text, **fields)


class LocalModels(BackendWrapper):
    """A backend with some models in this process; all other requests go to the inner backend."""

    def __init__(self, backend: Backend, models: Sequence[HfModel]) -> None:
        super().__init__(backend)
        self._models = {model.name: model for model in models}

    def __repr__(self) -> str:
        return f"LocalModels({self._backend!r}, {list(self._models.values())!r})"

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply of the model that the request names."""
        return (self._models.get(request.model) or self._backend).complete(request)

    def close(self) -> None:
        """Close the models and the inner backend; idempotent."""
        for client in (*self._models.values(), self._backend):
            client.close()


def model_folder(name: str) -> str:
    """Return the folder or hub id of an `hf:` name; `qm train sft` puts the model into the subfolder `model`."""
    spec = name.removeprefix(PREFIX)
    inside = Path(spec) / "model"
    return str(inside) if inside.is_dir() else spec


def _load(folder: str, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return tokenizer, model.to(device).eval()
    except Exception as error:  # broken files fail in as many ways as there are readers
        reason = reason_of(error)
        raise UsageError(f"{PREFIX}{folder}: no model can be loaded ({reason}); give a folder or a hub id") from None


def _check_template(tokenizer: Any, name: str) -> None:
    """Raise a UsageError for a chat template that does not end; it is a program, though without files or network."""
    if not getattr(tokenizer, "chat_template", None):
        return
    ended = threading.Event()

    def render() -> None:
        with contextlib.suppress(Exception):  # a template may refuse these turns
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        ended.set()

    threading.Thread(target=render, daemon=True).start()
    if not ended.wait(TEMPLATE_S):
        raise UsageError(f"{name}: its chat template does not end within {TEMPLATE_S:g} s; give another model")


def training_prompt(folder: str) -> dict[str, Any] | None:
    """Return the prompt template in query_mutator.json, None without one."""
    path = Path(folder) / PROMPT_FILE
    if not path.is_file():
        return None
    try:
        template = dict(json.loads(path.read_text(encoding="utf-8")))
        if template["prompt"] is not None and "{instruction}" not in template["prompt"]:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path}: `prompt` must be a text with {{instruction}} in it, or null") from None
    return template if template["prompt"] is not None else None


def _prefix_ids(tokenizer: Any) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text."""
    full, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start])
    return []


def _digest(folder: str) -> str:
    """Return a sha256 of the model's weights and configuration files; for a hub id the id itself."""
    path = Path(folder)
    if not path.is_dir():
        return f"{PREFIX}{folder}"
    digest = hashlib.sha256()
    for file in sorted(file for pattern in _HASHED for file in path.glob(pattern)):
        digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()
