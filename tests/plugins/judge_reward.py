"""Two reward parts of one's own: one counts backticks, the other asks a model."""

from query_mutator.rewards import PARTS, Evidence, Scoring
from query_mutator.types import ChatRequest


@PARTS.register("quoted")
def quoted(evidence: Evidence) -> float:
    """Return 1 when the answer has a name in backticks."""
    return float(evidence.answer.count("`") >= 2)


@PARTS.register("judged")
def judged(evidence: Evidence) -> Scoring:
    """Return 1 when a model that sees the answer is sure of something."""
    prompt = f"Grade this answer about a count: {evidence.answer}"
    reply = yield ChatRequest.user(prompt, model="librarian", purpose="judge", max_tokens=16)
    return float("not sure" not in reply.text)
