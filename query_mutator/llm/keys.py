"""What makes two requests the same request, for sharing a call and for remembering a reply."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted

from query_mutator.types import ChatRequest

_encode = json.JSONEncoder(sort_keys=True).encode


def is_repeatable(request: ChatRequest) -> bool:
    """Return whether two equal requests mean one reply: not if it is drawn at random and no draw is named."""
    return request.temperature == 0 or request.seed is not None or request.sample is not None


def request_key(request: ChatRequest, *, identity: str = "") -> str:
    """Return a sha256 of all that decides a reply; `identity` stands for the model's weights and how they are run.

    The purpose of a call is not among it: mutator and target may share a reply.
    """
    if identity:
        return _key(request, identity)
    if not request.known_key:  # two threads that come here at once write the same
        object.__setattr__(request, "known_key", _key(request, request.model))
    return request.known_key


def _key(request: ChatRequest, identity: str) -> str:
    """Return the sha256 of a JSON list: most of it is the same from call to call and encoded once."""
    messages = ", ".join([f"[{quoted(message.role)}, {quoted(message.content)}]" for message in request.messages])
    numbers = _encoded(request.max_tokens, request.temperature, request.seed, request.sample)
    options = _encode(dict(request.options)) if request.options else "{}"
    return hashlib.sha256(f"[{quoted(identity)}, [{messages}], {numbers}, {options}]".encode()).hexdigest()


@lru_cache(maxsize=256, typed=True)  # typed: 0 and 0.0 are written differently
def _encoded(*values: float | None) -> str:
    return _encode(values)[1:-1]
