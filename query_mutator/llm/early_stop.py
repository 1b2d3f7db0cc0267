"""Cut a reply whose first sentence is a refusal: the connection is closed, which frees the server's slot.

A thought is not part of the reply, and what it says is not judged. One that the prompt opened is seen at its end only.

The verdict is that of the full text, because a predicate that looks for words of refusal near the start finds in the
full text what it finds in a complete first sentence.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace

from query_mutator.llm.client import BackendWrapper, ModelServer
from query_mutator.types import ChatRequest, Completion, without_thought

_SENTENCE_END = re.compile(r"[.!?](?=\s)|[。！？]|\n")


def first_sentence(text: str) -> str | None:
    """Return the first sentence once it is complete: something follows its end, unless that is `。`, `！` or `？`."""
    text = text.lstrip()
    end = _SENTENCE_END.search(text)
    return text[: end.end()] if end else None


class EarlyStop(BackendWrapper):
    """A backend that streams target replies and cuts those whose first sentence satisfies `is_refusal`."""

    def __init__(self, backend: ModelServer, *, is_refusal: Callable[[str], bool]) -> None:
        super().__init__(backend)
        self._server = backend
        self._is_refusal = is_refusal
        self._lock = threading.Lock()  # guards the counters below
        self.cut_replies = 0
        self._cut_tokens = 0
        self._cut_limit_tokens = 0
        self._whole_replies = 0
        self._whole_tokens = 0

    @property
    def tokens_saved(self) -> int:
        """Return an estimate of the tokens not written: it assumes cut replies as long as the mean of complete ones.

        Before the first complete reply, the request's `max_tokens` stands in for that mean.
        """
        with self._lock:
            if not self._whole_replies:
                return self._cut_limit_tokens - self._cut_tokens
            mean = self._whole_tokens / self._whole_replies
            return max(0, round(self.cut_replies * mean) - self._cut_tokens)

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply, or its first sentence if that is a refusal; only calls to the target can be cut.

        A reply whose log probability is asked for is read whole.
        """
        if request.purpose != "target" or request.logprobs:
            return self._server.complete(request)
        judge = _Judge(self._is_refusal)
        completion = self._server.complete_until(request, judge)
        if not completion.ok:
            return completion
        self._count(completion, was_cut=judge.refused, limit_tokens=request.max_tokens)
        # What follows the sentence depends on how the server split its stream into pieces, so it is dropped.
        return replace(completion, text=judge.sentence.strip()) if judge.refused else completion

    def _count(self, completion: Completion, *, was_cut: bool, limit_tokens: int) -> None:
        with self._lock:
            if was_cut:
                self.cut_replies += 1
                self._cut_tokens += completion.completion_tokens
                self._cut_limit_tokens += limit_tokens
            else:
                self._whole_replies += 1
                self._whole_tokens += completion.completion_tokens


class _Judge:
    """Judges a growing reply once: when its first sentence is complete."""

    def __init__(self, is_refusal: Callable[[str], bool]) -> None:
        self._is_refusal = is_refusal
        self.sentence = ""
        self.refused = False

    def __call__(self, text: str) -> bool:
        """Return whether to cut the text here."""
        if not self.sentence:
            self.sentence = first_sentence(without_thought(text)) or ""
            self.refused = bool(self.sentence) and self._is_refusal(self.sentence)
        return self.refused
