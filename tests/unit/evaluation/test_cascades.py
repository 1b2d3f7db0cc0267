"""Cascades that are put together from the answers of each model alone, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from query_mutator.evaluation.comparison import logprob_cascade, question_classifier
from query_mutator.evaluation.summary import Outcome
from query_mutator.types import ErrorInfo, Question


def alone(model: str, price: float, right: str, logprobs: tuple[float | None, ...]) -> list[Outcome]:
    """Return the outcomes of a model that is right where a text has a 1."""
    return [
        Outcome(
            question_id=str(place),
            success=float(digit),
            calls=1,
            price=price,
            models=(model,),
            asked=("?",),
            forms=(model,),
            answers=(f"{model} {place}",),
            logprobs=(logprob,),
            submitted=0,
        )
        for place, (digit, logprob) in enumerate(zip(right, logprobs, strict=True))
    ]


def test_the_answers_of_the_lowest_log_probability_go_on_within_the_price() -> None:
    known = {"large": alone("large", 8, "1111", (None,) * 4), "small": alone("small", 1, "1001", (-0.1, -2, -1, -0.3))}
    found = logprob_cascade(known, price=5.0)
    assert [one.models for one in found] == [("small",), ("small", "large"), ("small", "large"), ("small",)]
    assert [(one.calls, one.price, one.answer) for one in found[:2]] == [(1, 1, "small 0"), (2, 9, "large 1")]
    assert sum(one.price for one in found) / 4 == 5
    assert [one.success for one in logprob_cascade(known, price=4.9)] == [1, 1, 0, 1]  # one question less goes on
    known["small"][1] = replace(known["small"][1], error=ErrorInfo(kind="empty", message=""), logprobs=(), answers=())
    assert [len(one.models) for one in logprob_cascade(known, price=5.0)] == [1, 2, 2, 1]
    silent = {name: [replace(one, logprobs=(None,)) for one in row] for name, row in known.items()}
    assert logprob_cascade(silent, price=5.0) == []


class Texts:
    """What the classifier reads of a task."""

    def __init__(self, *texts: str) -> None:
        self.questions = [Question(id=str(place), text=text) for place, text in enumerate(texts)]
        self.question_vectors = np.zeros((len(texts), 2), dtype=np.float32)


@pytest.mark.parametrize(("price", "models"), [(1.0, "ssss"), (4.5, "lsls"), (99.0, "llll")])
def test_the_words_of_a_question_choose_its_model(price: float, models: str) -> None:
    texts = Texts(*["integrate hard functions", "add apples"] * 30)
    training = {
        "s": alone("s", 1, "01" * 30, (None,) * 60),
        "l": alone("l", 8, "11" * 30, (None,) * 60),
    }
    known = {name: row[:4] for name, row in training.items()}
    test = Texts("integrate hard functions", "add apples", "integrate functions", "add more apples")
    found = question_classifier(known, test, training, texts, price=price)  # type: ignore[arg-type]
    assert "".join(one.models[0] for one in found) == models
    training["l"] = [replace(one, error=ErrorInfo(kind="timeout", message="")) for one in training["l"]]
    found = question_classifier(known, test, training, texts, price=price)  # type: ignore[arg-type]
    assert {one.models for one in found} == {("s",)}
