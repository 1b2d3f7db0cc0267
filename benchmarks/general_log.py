"""Write a log of recorded replies: the training questions of `general` in all forms, for `qm plan --from-logs`.

python -m benchmarks.general_log log.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from query_mutator import forms
from query_mutator.data import split_questions
from query_mutator.data.bundled import general, general_bank
from query_mutator.data.split import target_key
from query_mutator.encoder import resolve_encoder
from query_mutator.encoder.weights import DEFAULT_ENCODER
from query_mutator.env.task import CallSettings, build_task
from query_mutator.files import encode
from query_mutator.llm.recorded import RecordedBackend
from query_mutator.types import AS_IS
from scripts.recorded_requests import MAX_TOKENS


def logged_rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each training question and form."""
    (backend,) = RecordedBackend.open([])
    target, mutator = backend.default_models()
    task = build_task(
        split_questions(general()).train,
        calls=CallSettings(target_model=target, mutator_model=mutator, target_max_tokens=MAX_TOKENS),
        encoder=resolve_encoder(DEFAULT_ENCODER, light=True),
        operators=(),
        known_words=(),
        forms=forms.select(forms.ALL),
        bank=general_bank(),
    )
    for at, question in enumerate(task.questions):
        for form in (AS_IS, *(form.name for form in task.forms)):
            reply = backend.complete(task.target(at, question.text, form))
            about = {"gold": list(question.accept), "tags": list(question.tags), "target": target_key(question)}
            yield {"question": question.text, "form": form, "reply": reply.text, **about}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file = parser.parse_args(argv).file
    with file.open("xb") as log:  # replaces nothing
        log.writelines(encode(row) + b"\n" for row in logged_rows())


if __name__ == "__main__":
    main()
