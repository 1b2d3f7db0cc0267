"""`qm rewrite`: rewrite questions as a trained policy does, and show the answers."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from query_mutator.apply import Limits, Rewrite, Rewriter
from query_mutator.bounds import Count, Prose, Seconds
from query_mutator.cli.flags import Positional
from query_mutator.cli.outputs import JsonTo, Output, OutputFlags, holding
from query_mutator.commands.policy import RunAndFlags, max_failure_rate, open_policy
from query_mutator.env.scheduling import Call, Flow, Need, map_needs, run_flow
from query_mutator.errors import UsageError
from query_mutator.files import encode, write_text
from query_mutator.session.play import check_failures
from query_mutator.types import AS_IS, CONTROLS


@dataclass(frozen=True, kw_only=True)
class RewriteFlags(RunAndFlags, OutputFlags):
    """Rewrite a question as the trained policy would, and show the answer."""

    words: Positional[tuple[Prose, ...]] = ()
    """The question, after a run folder if it is not the latest; - reads one per line from standard input."""
    max_calls: Count | None = None
    """Maximum model calls for a question, without retries; the best answer so far is submitted."""
    request_deadline_s: Seconds | None = None
    """Time limit of a question in seconds; the best answer so far is submitted."""
    show: bool = False
    """Also print every prompt and reply."""
    json: Annotated[JsonTo, Output(holding(b'"rewrites":'))] = None
    """Write one JSON object per question (question, rewrites, operators, answer) to FILE; without FILE, print them."""


def rewrite(flags: RewriteFlags) -> None:
    """Print rewrites and final answer of each question."""
    texts = [line.strip() for line in sys.stdin] if flags.words == ("-",) else [flags.words[0].strip()]
    texts = [text for text in texts if text]
    if not texts:
        raise UsageError("the question is empty; give one as an argument, or - to read lines from standard input")

    with open_policy(flags) as rewriter:
        bounds: dict[str, Any] = {"max_calls": flags.max_calls, "deadline_s": flags.request_deadline_s}
        shown = (_shown(rewriter, text, Limits(**bounds)) for text in texts)
        rewrites = [*shown] if flags.show else rewriter.rewrite_many(texts, **bounds)
    lines = "".join(encode(_row(one)).decode() + "\n" for one in rewrites)
    print(lines if flags.json == "-" else "\n".join(map(_in_words, rewrites)), end="")
    if flags.json not in (None, "-"):
        write_text(flags.json, lines)
    kinds = Counter(one.error.kind for one in rewrites if one.error is not None)
    most = max_failure_rate(flags, rewriter.saved)
    check_failures(dict(kinds.most_common()), len(rewrites), max_failure_rate=most)


def _shown(rewriter: Rewriter, text: str, limits: Limits) -> Rewrite:
    """Rewrite a question, and print its calls as they are made."""

    def show(need: Need) -> Flow:
        result = yield need
        if isinstance(need, Call):
            print(f"--- {need.request.purpose}: {need.request.model}")
            for message in need.request.messages:
                print(f"[{message.role}] {message.content}")
            print(f"[reply] {result.error or result.text}")
        return result

    models, flow = rewriter.models, map_needs(rewriter.flow(text, limits=limits), show)
    return run_flow(flow, client=models.calls.eval_client, encoder=models.encoder, retry_policy=models.retry_policy)  # type: ignore[no-any-return]


def _row(one: Rewrite) -> dict[str, Any]:
    """Return the row of a question: its rewrites, the operators chosen, the answer; or the error."""
    error = {} if one.error is None else {"error": str(one.error)}
    if one.answer is None:
        return {"question": one.question, **error}
    return {
        "question": one.question,
        "rewrites": [step.text for step in one.steps if step.operator not in CONTROLS],
        "operators": list(one.operators),
        "rejected": [{"operator": operator, "guard": guard} for operator, guard in one.rejected],
        "answer": one.answer,
        "submitted": one.text,
        "form": one.form,
        "messages": [asdict(message) for message in one.messages],
        **({"options": dict(one.options)} if one.options else {}),
        "why": one.why,
        "calls": one.calls,
        **error,
    }


def _in_words(one: Rewrite) -> str:
    """Return a question as lines in two columns; the wording whose answer was submitted is marked."""
    wordings = [("question", one.question, AS_IS), *((step.operator, step.text, step.form) for step in one.changes)]
    lines = [
        (f"{name} *" if (text, form) == (one.text, one.form) and one.answer is not None else name, text)
        for name, text, form in wordings
    ]
    lines += [(operator, f"not used: fails the guard {guard!r}") for operator, guard in one.rejected]
    lines += [("submitted", f"* {one.why}")] if one.why else []
    lines += [("error", str(one.error))] if one.error is not None else []
    lines += [("answer", one.answer)] if one.answer is not None else []
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {' '.join(text.split())}" for name, text in lines) + "\n"
