"""What makes two requests the same request, for sharing a call and for remembering a reply."""

from __future__ import annotations

import hashlib
import json

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
    parts = [
        identity,
        [[message.role, message.content] for message in request.messages],
        request.max_tokens,
        request.temperature,
        request.seed,
        request.sample,
        dict(request.options),
    ]
    return hashlib.sha256(_encode(parts).encode()).hexdigest()
