"""A language model in a folder, run in this process: `hf:FOLDER` (or a hub id) wherever a mutator model is named.

Requests that wait are answered together. A folder of `qm train sft` says in query_mutator.json how its model was asked
in training; a rewriter gets the question alone then, without the operator's prompt around it. torch and transformers
are imported when a model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.llm.client import Backend, FloatArray
from query_mutator.types import ChatRequest, Completion, ErrorInfo

__all__ = ["PREFIX", "PROMPT_FILE", "HfModel", "LocalModels", "is_local", "local_models", "model_folder"]

PREFIX = "hf:"
PROMPT_FILE = "query_mutator.json"
MAX_BATCH = 16
_QUESTION = re.compile(r"<question>\s*(.*?)\s*</question>", re.DOTALL)
_HASHED = ("*.safetensors", "*.bin", "*.json")


def is_local(model: str | None) -> bool:
    """Say whether a model's name asks for a model in this process."""
    return model is not None and model.startswith(PREFIX)


def local_models(*names: str | None, deterministic: bool = False) -> tuple[HfModel, ...]:
    """Return a loaded model for each different `hf:` name among these."""
    wanted = dict.fromkeys(name for name in names if name is not None and is_local(name))
    return tuple(HfModel(name, max_batch=1 if deterministic else MAX_BATCH) for name in wanted)


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: ChatRequest
    ids: list[int]
    began: float
    reply: Future[Completion] = field(default_factory=Future)

    @property
    def kind(self) -> tuple[int, float, int | None]:
        """Return what requests that are answered together must have in common."""
        return self.request.max_tokens, self.request.temperature, self.request.seed


class HfModel:
    """A client for one model; greedy unless a request asks for a temperature, which is answered alone.

    A batched matrix product differs from single rows in the last bits: `max_batch=1` makes replies independent of
    what else is asked.
    """

    def __init__(self, name: str, *, max_batch: int = MAX_BATCH, device: str = "auto") -> None:
        self.name = name
        self._max_batch = max_batch
        folder = model_folder(name)
        self._tokenizer, self._model = _load(folder, device)
        self._asked = _how_asked(folder)
        self.digest = _digest(folder)
        self._before = _special_start(self._tokenizer)
        self._waiting: deque[_Waiting] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Hf({self.name!r})"

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply, after those that waited before; it never raises for a failed call."""
        waiting = _Waiting(request, self._prompt_ids(request), time.perf_counter())
        room = self._room(waiting)
        if room < 1:
            return Completion.failed("request", f"a prompt of {len(waiting.ids)} tokens does not fit {self.name}")
        with self._wake:
            if self._closed:
                return Completion.failed("cancelled", f"{self.name} was closed")
            self._waiting.append(waiting)
            self._wake.notify()
        return waiting.reply.result()

    def close(self) -> None:
        """Cancel what waits and stop; idempotent."""
        with self._wake:
            self._closed = True
            cancelled = list(self._waiting)
            self._waiting.clear()
            self._wake.notify()
        for one in cancelled:
            one.reply.set_result(Completion.failed("cancelled", f"{self.name} was closed"))

    # --- prompts ---------------------------------------------------------------------------------------------------

    def _prompt_ids(self, request: ChatRequest) -> list[int]:
        text = request.messages[-1].content
        if self._asked is not None:
            found = _QUESTION.search(text) if self._asked.get("asks") == "question" else None
            text = str(self._asked["prompt"]).replace("{instruction}", found[1] if found else text)
        elif getattr(self._tokenizer, "chat_template", None):
            messages = [{"role": one.role, "content": one.content} for one in request.messages]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return [*self._before, *self._tokenizer.encode(text, add_special_tokens=False)]

    def _room(self, waiting: _Waiting) -> int:
        """Return how many tokens the reply may have."""
        limit = getattr(self._model.config, "max_position_embeddings", None)
        wanted = waiting.request.max_tokens
        return wanted if limit is None else min(wanted, limit - len(waiting.ids))

    # --- the thread that runs the model ----------------------------------------------------------------------------

    def _serve(self) -> None:
        while batch := self._next_batch():
            try:
                texts = self._generate(batch)
            except Exception as error:  # out of memory, or whatever a model's own code may raise
                reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
                for one in batch:
                    one.reply.set_result(Completion.failed("server", reason, model=self.name))
                continue
            for one, (text, count) in zip(batch, texts, strict=True):
                one.reply.set_result(self._completion(one, text, count))

    def _next_batch(self) -> list[_Waiting]:
        """Wait for requests and return those that can be answered together; none when closed."""
        with self._wake:
            while not self._waiting and not self._closed:
                self._wake.wait()
            if not self._waiting:
                return []
            first = self._waiting.popleft()
            size = 1 if first.request.temperature else self._max_batch
            batch, others = [first], list[_Waiting]()
            while self._waiting:
                one = self._waiting.popleft()
                (batch if len(batch) < size and one.kind == first.kind else others).append(one)
            self._waiting.extend(others)
            return batch

    def _generate(self, batch: Sequence[_Waiting]) -> list[tuple[str, int]]:
        """Return text and number of tokens of each reply."""
        import torch

        longest = max(len(one.ids) for one in batch)
        pad = self._pad_id()
        ids = torch.tensor([[pad] * (longest - len(one.ids)) + one.ids for one in batch], device=self._model.device)
        mask = torch.tensor([[0] * (longest - len(one.ids)) + [1] * len(one.ids) for one in batch])
        request = batch[0].request
        sampling: dict[str, Any] = {"do_sample": bool(request.temperature)}
        with torch.inference_mode(), torch.random.fork_rng(enabled=bool(request.temperature)):
            if request.temperature:
                sampling["temperature"] = request.temperature
                torch.manual_seed(request.seed or 0)
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask.to(self._model.device),
                max_new_tokens=min(self._room(one) for one in batch),
                pad_token_id=pad,
                eos_token_id=self._tokenizer.eos_token_id,
                **sampling,
            )
        return [self._text(row) for row in out[:, longest:].tolist()]

    def _pad_id(self) -> int:
        for found in (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id):
            if found is not None:
                return int(found)
        return 0

    def _text(self, ids: list[int]) -> tuple[str, int]:
        if self._tokenizer.eos_token_id in ids:
            ids = ids[: ids.index(self._tokenizer.eos_token_id)]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)).strip(), len(ids)

    def _completion(self, one: _Waiting, text: str, count: int) -> Completion:
        taken = time.perf_counter() - one.began
        fields: dict[str, Any] = {"model": self.name, "prompt_tokens": len(one.ids), "completion_tokens": count}
        fields |= {"total_s": taken, "latency_s": taken}
        if not text:
            return Completion.failed("empty", "the reply has no text", **fields)
        return Completion(text=text, **fields)


class LocalModels:
    """A backend with some models in this process; all other requests go to the inner backend."""

    def __init__(self, backend: Backend, models: Sequence[HfModel]) -> None:
        self._backend = backend
        self._models = {model.name: model for model in models}

    def __repr__(self) -> str:
        return f"LocalModels({self._backend!r}, {list(self._models.values())!r})"

    @property
    def url(self) -> str:
        """The address of the inner backend's server."""
        return self._backend.url

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply of the model that the request names."""
        return (self._models.get(request.model) or self._backend).complete(request)

    def embed(self, model: str, texts: Sequence[str]) -> FloatArray | ErrorInfo:
        """Return the inner backend's embeddings."""
        return self._backend.embed(model, texts)

    def close(self) -> None:
        """Close the models and the inner backend; idempotent."""
        for client in (*self._models.values(), self._backend):
            client.close()


def model_folder(name: str) -> str:
    """Return the folder or hub id of an `hf:` name; a folder of `qm train sft` has the model in its `model`."""
    spec = name.removeprefix(PREFIX)
    inside = Path(spec) / "model"
    return str(inside) if inside.is_dir() else spec


def _load(folder: str, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder), model.to(device).eval()
    except Exception as error:  # files that are no model fail in as many ways as there are readers of them
        reason = str(error).strip().partition("\n")[0]
        what = f"no model can be read from it ({reason})"
        raise UsageError(f"{PREFIX}{folder}: {what}; give a folder or a hub id") from None


def _how_asked(folder: str) -> dict[str, Any] | None:
    """Return what query_mutator.json says, None where there is none."""
    path = Path(folder) / PROMPT_FILE
    if not path.is_file():
        return None
    try:
        asked = json.loads(path.read_text(encoding="utf-8"))
        if asked["prompt"] is None:
            return None
        assert "{instruction}" in asked["prompt"]
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UsageError(f"{path}: `prompt` must be a text with {{instruction}} in it, or null") from None
    return dict(asked)


def _special_start(tokenizer: Any) -> list[int]:
    """Return the special tokens a tokenizer puts before a text."""
    full, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start])
    return []


def _digest(folder: str) -> str:
    """Return what tells this model's weights and files from another's; a hub id stands for itself."""
    path = Path(folder)
    if not path.is_dir():
        return f"{PREFIX}{folder}"
    digest = hashlib.sha256()
    for file in sorted(file for pattern in _HASHED for file in path.glob(pattern)):
        with file.open("rb") as content:
            digest.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
