"""JSON becomes records of the types that their fields have, or one line says which does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from query_mutator.files.whole import as_type, record_of
from query_mutator.types import Question


@dataclass(frozen=True, kw_only=True)
class Settings:
    count: int
    share: float = 0.5
    names: tuple[str, ...] = ()
    mode: Literal["a", 1] | None = None
    words: frozenset[str] = frozenset()
    questions: tuple[Question, ...] = ()
    more: Mapping[str, int | str] | None = None


def test_lists_objects_and_whole_numbers_become_what_the_fields_are() -> None:
    values: dict[str, Any] = {
        "count": 3, "share": 1, "names": ["a", "b"], "mode": "a", "words": ["x"], "more": {"k": 1}, "later": [],
        "questions": [{"id": "q", "text": "t", "tags": ["x"]}],
    }  # fmt: skip
    assert record_of(Settings, values, where="it") == Settings(
        count=3, share=1.0, names=("a", "b"), mode="a", words=frozenset("x"), more={"k": 1},
        questions=(Question(id="q", text="t", tags=("x",)),),
    )  # fmt: skip
    assert record_of(Settings, {"count": 1, "names": "a"}, where="it").names == ("a",)  # as earlier versions wrote it


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([], "it is not an object"),
        ({}, "missing 1 required keyword-only argument: 'count'"),
        ({"count": True}, "it.count is True, not int"),
        ({"count": 1.0}, "it.count is 1.0, not int"),
        ({"count": 1, "share": float("nan")}, "it.share is nan, not float"),
        ({"count": 1, "share": 10**400}, "it.share is 1000"),
        ({"count": 1, "names": [1]}, "it.names is 1, not str"),
        ({"count": 1, "mode": True}, "it.mode is True, not"),
        ({"count": 1, "more": {"k": []}}, "it.more is {'k': []}, not"),
        ({"count": 1, "questions": [{"id": 1}]}, "it.questions.id is 1, not str"),
        ({"count": "x" * 10**6}, "it.count is 'xxx"),
    ],
)
def test_another_type_is_one_short_line(values: object, says: str) -> None:
    with pytest.raises(ValueError, match="it") as caught:
        record_of(Settings, values, where="it")
    assert says in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_value_of_any_type_stays() -> None:
    assert as_type({"a": [1]}, Any, "it") == {"a": [1]}
