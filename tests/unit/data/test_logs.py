"""Rows of a log, and pairs of real traffic, as logged replies; a bad row is one line that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from query_mutator.data.logs import LoggedReply, log_path, read_logged_replies
from query_mutator.errors import DatasetError, UsageError
from query_mutator.files.json_lines import JsonLines
from query_mutator.runs.shadow import HEADER

ROW = {"question": "What is 2 + 2?", "form": "steps", "reply": "4", "gold": "4"}


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_a_row_may_use_other_names_and_say_more(tmp_path: Path) -> None:
    more = {"target": "sums", "logprob": -0.5, "cut": 0, "context": "Be brief.", "tags": ["easy"]}
    other = {"query": " What? ", "prompt": "mine", "reply": "", "right": "False", "about": "that", "accept": ["a", "b"]}
    found = list(read_logged_replies(written(tmp_path / "log.jsonl", {**ROW, **more, "gold": 4}, other)))
    assert found == [
        LoggedReply(
            where=f"{tmp_path}/log.jsonl:1", question="What is 2 + 2?", form="steps", reply="4", gold=("4",),
            target="sums", tags=("easy", "numeric"), logprob=-0.5, cut=False, context="Be brief.",
        ),
        LoggedReply(
            where=f"{tmp_path}/log.jsonl:2", question="What?", form="mine", reply="", label=False, gold=("a", "b"),
            target="that",
        ),
    ]  # fmt: skip


def test_csv_rows_are_read_too_and_the_form_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("question,reply,label,logprob,gold\nWho?,I,1,-2.5,\n", encoding="utf-8")
    (found,) = read_logged_replies(path)
    assert (found.form, found.label, found.logprob, found.gold) == ("as_is", True, -2.5, ())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"question": " "}, "`question` must be a text, not ' '"),
        ({"question": ["x"]}, "`question` must be a text, not ['x']"),
        ({"reply": None}, "`reply` must be a text; fields: question, form"),
        ({"form": 3}, "`form` must be a text, not 3"),
        ({"form": "You are an expert.\nAnswer:"}, "a name of one line"),
        ({"form": "x" * 301}, "a name of one line, of 300 characters at most; give each prompt a name"),
        ({"gold": []}, "`gold` must be a text, a number, or a list of one of them, not []"),
        ({"gold": [1, "x"]}, "`gold` must be a text, a number"),
        ({"gold": True}, "`gold` must be a text, a number"),
        ({"label": "maybe"}, "`label` is 'maybe'; write true or false, or 1 or 0"),
        ({"label": 2}, "`label` is 2; write true or false"),
        ({"target": 5}, "`target` must be a text, not 5"),
        ({"logprob": "low"}, "`logprob` must be a number, not 'low'"),
        ({"logprob": True}, "`logprob` must be a number, not True"),
        ({"cut": "half"}, "`cut` is 'half'"),
        ({"tags": "a"}, "`tags` must be a list of texts, not 'a'"),
        ({"context": 7}, "`context` must be a text, not 7"),
    ],
)
def test_a_bad_row_is_one_line_with_its_place(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", ROW, {**ROW, **change})
    with pytest.raises(DatasetError) as error:
        list(read_logged_replies(path))
    assert str(error.value).startswith(f"{path}:2: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def way(answer: str, **more: Any) -> dict[str, Any]:
    return {"answer": answer, "refused": False, "not_sure": False, "fit": 0.5, "chars": len(answer), "tokens": 3,
            "calls": 1, "seconds": 0.1, **more}  # fmt: skip


def pair(question: str, **more: Any) -> dict[str, Any]:
    return {"question": question, "rewrite": question, "form": "as_is", "operators": [], "sent": "original",
            "original": way("one"), "rewritten": way("two"), "judge": None, **more}  # fmt: skip


def test_pairs_of_traffic_are_two_rows_each_but_one_where_nothing_was_changed(tmp_path: Path) -> None:
    judged = {"model": "umpire", "choice": "rewritten"}
    with_form = pair("Who?", form="statement", judge=judged)
    reworded = pair("wats up", rewrite="What is up?", operators=["clean"], form="steps", gold=["two"])
    log = JsonLines(tmp_path / "shadow.jsonl")
    log.append(HEADER, with_form, reworded, pair("Same?", judge={"model": "umpire", "choice": "tie"}))
    log.close()
    assert log_path(tmp_path) == tmp_path / "shadow.jsonl"
    found = list(read_logged_replies(log_path(tmp_path)))
    assert [(one.form, one.reply, one.is_preferred, one.gold) for one in found] == [
        ("as_is", "one", False, ()),
        ("statement", "two", True, ()),
        ("as_is", "one", None, ("two",)),
        ("clean > steps", "two", None, ("two",)),
        ("as_is", "one", None, ()),
    ]
    assert all(one.is_traffic for one in found)
    assert found[0].where.endswith("shadow.jsonl:2")
    (tmp_path / "shadow.jsonl").write_bytes((tmp_path / "shadow.jsonl").read_bytes().replace(b"Who", b"Why"))
    with pytest.raises(UsageError, match=r"shadow\.jsonl"):
        list(read_logged_replies(log_path(tmp_path)))
