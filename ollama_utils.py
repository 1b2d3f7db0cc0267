"""Calls for scripts: encode queries, rewrite them, query the target model; one at a time or many at once.

    from ollama_utils import batch_mutate_queries, batch_query_target_model

    rewrites = batch_mutate_queries(queries, "spelling", model="qwen2.5:3b", batch_size=8)
    answers = batch_query_target_model(rewrites, model="llama3.2", batch_size=8)

Results are in the order of the queries, and every query gets a text: the original query if its rewrite failed,
DEFAULT_REFUSAL if its answer failed. `return_errors=True` returns `(text, ErrorInfo | None)` pairs. By default the
server is OLLAMA_HOST or http://127.0.0.1:11434, and the models are QUERY_MUTATOR_TARGET_MODEL and
QUERY_MUTATOR_MUTATOR_MODEL.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from query_mutator.errors import UsageError
from query_mutator.llm.client import Client
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.stack import build_client
from query_mutator.operators import OPERATORS, OperatorContext, clean_rewrite, local_rewrite, rejecting_guard
from query_mutator.settings import Calls
from query_mutator.types import ChatRequest, Completion, ErrorInfo, FloatArray, Purpose

if TYPE_CHECKING:
    from query_mutator.encoder import Encoder

__all__ = [
    "DEFAULT_BATCH_SIZE",
    "DEFAULT_REFUSAL",
    "CallOptions",
    "batch_encode_queries",
    "batch_mutate_queries",
    "batch_query_target_model",
    "encode_query",
    "mutate_query",
    "query_target_model",
]

logger = logging.getLogger(__name__)

DEFAULT_BATCH_SIZE = 8
#: What `batch_query_target_model` returns for a query whose call failed; never used for learning.
DEFAULT_REFUSAL = "I'm sorry, I can't help with that."
MAX_TOKENS: dict[Purpose, int] = {"mutate": 128, "target": 256}
MODEL_VARIABLES: dict[Purpose, str] = {
    "mutate": "QUERY_MUTATOR_MUTATOR_MODEL",
    "target": "QUERY_MUTATOR_TARGET_MODEL",
}

Outcome = tuple[str, ErrorInfo | None]


class CallOptions(TypedDict, total=False):
    """Keyword arguments of every function that calls a model."""

    model: str | None  # default: the variable of MODEL_VARIABLES
    url: str | None  # default: OLLAMA_HOST, else http://127.0.0.1:11434
    max_tokens: int  # default: MAX_TOKENS
    temperature: float  # default: 0
    seed: int | None  # default: the server's own
    timeout_s: float  # of one attempt, from connecting to the last byte; default: 120
    max_retries: int  # default: 2
    client: Client | None  # used instead of connections to `url`, and left open; for many small batches
    batch_size: int | None  # calls in flight in a batch; default: 8
    max_workers: int | None  # alias of batch_size


# ---------------------------------------------------------------- the target model


def query_target_model(query: str, *, return_errors: bool = False, **settings: Unpack[CallOptions]) -> Any:
    """Return the target model's answer to one query, DEFAULT_REFUSAL when the call failed."""
    settings["batch_size"] = 1
    [outcome] = batch_query_target_model([query], return_errors=True, **settings)
    return outcome if return_errors else outcome[0]


def batch_query_target_model(
    queries: Sequence[str], *, return_errors: bool = False, **settings: Unpack[CallOptions]
) -> list[Any]:
    """Return the target model's answers in the order of `queries`, with `batch_size` (8) calls in flight.

    A failed call returns DEFAULT_REFUSAL. `max_workers` is another name for `batch_size`. ValueError for sizes below 1.
    """
    replies = _complete_all(_texts(queries), purpose="target", settings=settings)
    outcomes = [
        _outcome(reply, text=reply.text, instead=DEFAULT_REFUSAL, what=f"querying {query!r}")
        for query, reply in zip(queries, replies, strict=True)
    ]
    return outcomes if return_errors else [text for text, _ in outcomes]


# ---------------------------------------------------------------- the mutator model


def mutate_query(query: str, operator: str, *, return_errors: bool = False, **settings: Unpack[CallOptions]) -> Any:
    """Return one query rewritten by the operator, or the query itself when the call failed."""
    settings["batch_size"] = 1
    [outcome] = batch_mutate_queries([query], operator, return_errors=True, **settings)
    return outcome if return_errors else outcome[0]


def batch_mutate_queries(
    queries: Sequence[str],
    operators: str | Sequence[str],
    *,
    return_errors: bool = False,
    **settings: Unpack[CallOptions],
) -> list[Any]:
    """Return the queries rewritten, in order, by one operator or one per query, with `batch_size` (8) calls in flight.

    A query stays unchanged if its call fails or a guard of the operator rejects the rewrite. `max_workers` is another
    name for `batch_size`. ValueError for a size below 1, an unknown operator, or not one operator per query.
    """
    names = [operators] * len(queries) if isinstance(operators, str) else list(operators)
    if len(names) != len(queries):
        raise ValueError(f"{len(names)} operators for {len(queries)} queries; give one name, or one for each query")
    chosen = [OPERATORS.get(name) for name in names]
    context, queries = OperatorContext(), _texts(queries)
    asked = [index for index, one in enumerate(chosen) if local_rewrite(one) is None]
    prompts = [chosen[index].render(queries[index], context=context) for index in asked]
    replies = dict(zip(asked, _complete_all(prompts, purpose="mutate", settings=settings), strict=True))
    outcomes: list[Outcome] = []
    for index, (query, one) in enumerate(zip(queries, chosen, strict=True)):
        what = f"rewriting {query!r} by {names[index]}"
        local, reply = local_rewrite(one), replies.get(index, Completion())
        text = clean_rewrite(reply.text) if local is None else local(query, context=context)
        if text and (guard := rejecting_guard(one, query, text, context=context)):
            logger.info("%s failed the guard %r", what, guard)
            text = query
        outcomes.append(_outcome(reply, text=text, instead=query, what=what))
    return outcomes if return_errors else [text for text, _ in outcomes]


# ---------------------------------------------------------------- the sentence encoder


def encode_query(query: str, *, model: str | None = None) -> FloatArray:
    """Return the embedding of one query [dim], a unit vector."""
    row: FloatArray = batch_encode_queries([query], model=model)[0]
    return row


def batch_encode_queries(
    queries: Sequence[str],
    *,
    batch_size: int | None = None,
    max_workers: int | None = None,
    model: str | None = None,
) -> FloatArray:
    """Return the embeddings of queries [n, dim] as unit rows, computed `batch_size` (8) texts at a time.

    `model` is any encoder of `--encoder`: a name (by default all-MiniLM-L6-v2), a folder or `hash`. Raises
    EncoderError if it cannot be loaded.
    """
    import numpy as np

    rows_at_once = _calls_at_once(batch_size, max_workers)
    texts = _texts(queries)
    encoder = _encoder(model)
    if not texts:
        return np.zeros((0, encoder.dim), dtype=np.float32)
    starts = range(0, len(texts), rows_at_once)
    return np.concatenate([encoder.encode(texts[start : start + rows_at_once]) for start in starts])


@functools.lru_cache(maxsize=4)
def _encoder(model: str | None) -> Encoder:
    """Return the encoder, loaded once."""
    from query_mutator.encoder import DEFAULT_ENCODER, resolve_encoder

    return resolve_encoder(model or DEFAULT_ENCODER)


# ---------------------------------------------------------------- shared


def _calls_at_once(batch_size: int | None, max_workers: int | None) -> int:
    if batch_size is not None and max_workers is not None and batch_size != max_workers:
        raise ValueError(f"batch_size={batch_size} and max_workers={max_workers} are one setting; give one of them")
    size = batch_size if batch_size is not None else max_workers
    size = DEFAULT_BATCH_SIZE if size is None else size
    if size < 1:
        raise ValueError(f"batch_size={size} must be at least 1")
    return size


def _texts(queries: Sequence[str]) -> list[str]:
    if isinstance(queries, str):
        raise ValueError("queries is a single text; pass a list of texts, or use the function for one query")
    return list(queries)


def _complete_all(prompts: Sequence[str], *, purpose: Purpose, settings: CallOptions) -> list[Completion]:
    """Return the replies in the order of the prompts; Ctrl-C cancels the calls in flight first."""
    if unknown := settings.keys() - CallOptions.__annotations__.keys():
        raise TypeError(f"unknown setting {', '.join(unknown)}; known: {', '.join(CallOptions.__annotations__)}")
    at_once = _calls_at_once(settings.get("batch_size"), settings.get("max_workers"))
    variable, given = MODEL_VARIABLES[purpose], settings.get("client")
    model = settings.get("model") or os.environ.get(variable)
    if not prompts:
        return []
    if not model:
        raise UsageError(f"no model given; pass model=..., or set {variable}")
    requests = [
        ChatRequest.user(
            prompt,
            model=model,
            purpose=purpose,
            max_tokens=settings.get("max_tokens", MAX_TOKENS[purpose]),
            temperature=settings.get("temperature", 0.0),
            seed=settings.get("seed"),
        )
        for prompt in prompts
    ]
    client: Client = (
        given
        or build_client(
            OllamaBackend.address(settings.get("url")),
            batch_size=at_once,
            timeout_s=settings.get("timeout_s", Calls.timeout_s),
            max_retries=settings.get("max_retries", 2),
        ).retry
    )
    with nullcontext() if given else closing(client), ThreadPoolExecutor(at_once, thread_name_prefix="qm-call") as pool:
        try:
            return list(pool.map(client.complete, requests))
        except BaseException:
            client.close()
            raise


def _outcome(reply: Completion, *, text: str, instead: str, what: str) -> Outcome:
    """Return the text of a reply, or its stand-in and the error."""
    error = reply.error
    if error is None and not text:
        error = ErrorInfo(kind="empty", message="the reply has no question in it")
    if error is None:
        return text, None
    logger.warning("%s failed, using %r instead (%s)", what, instead, error)
    return instead, error
