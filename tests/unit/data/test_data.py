"""Question files and logs, the split, and what the bundled sets promise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from query_mutator.data import guard_questions, load_questions, split_questions
from query_mutator.data.loaders import general
from query_mutator.data.logs import LoggedReply, log_path, read_logged_replies
from query_mutator.data.split import FOLDS, fold_of, target_key, validation_split
from query_mutator.errors import DatasetError, UsageError
from query_mutator.files.json_lines import JsonLines
from query_mutator.runs.shadow import HEADER
from query_mutator.types import NUMERIC

ROW = {"question": "What is 2 + 2?", "form": "steps", "reply": "4", "gold": "4"}


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_jsonl_row_becomes_a_question(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", '{"id": "a", "query": " sort a list ", "accept": ["sorted"], "tags": ["plain"]}')
    (question,) = load_questions(path)
    assert (question.id, question.text, question.accept, question.tags) == ("a", "sort a list", ("sorted",), ("plain",))
    assert question.reference is None


def test_csv_and_parquet_give_the_same_questions(tmp_path: Path) -> None:

    rows = [{"q": "capital of France?", "a": "Paris"}, {"q": "two and two?", "a": "4"}]
    csv_path = write(tmp_path / "q.csv", "q,a", *(f"{row['q']},{row['a']}" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "q.parquet")
    loaded = [
        load_questions(path, question_column="q", answer_column="a") for path in (csv_path, tmp_path / "q.parquet")
    ]
    assert loaded[0] == loaded[1]
    assert (loaded[0][0].accept, loaded[0][0].reference) == (("Paris",), "Paris")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", ":2: not JSON"),
        ("[1]", ":2: a JSON list"),
        ('{"query": "  "}', ":2: the question is empty"),
        ('{"query": 7}', ":2: the question is not a text"),
        ('{"query": ' + "[" * 500 + "]" * 500 + "}", ":2: not JSON (nested more than 100 levels deep)"),
        ('{"query": ' + "[" * 200_000, ":2: not JSON (nested more than 100 levels deep)"),
        ('{"query": "\\ud800"}', ":2: not JSON (a lone surrogate"),
        ('{"query": "x", "id": "\\udfff"}', ":2: not JSON (a lone surrogate"),
        ('{"query": "x", "id": {"a": 1}}', ":2: `id` must be a text or a number"),
        ('{"query": "x", "accept": NaN}', ":2: not JSON (NaN is not a JSON number"),
        ('{"query": "x", "accept": 1e999}', ":2: not JSON (the number 1e999 is too large"),
        ('{"query": "x", "accept": {"a": 1}}', ":2: `accept` must be a text, a number or a list of names"),
        ('{"query": ""}', ":2: the question is empty"),
        ('{"other": "x"}', ":2: no question column"),
        ('{"query": "x", "accept": []}', ":2: `accept` must be a list"),
        ('{"id": "one", "query": "x"}', ":2: id 'one' is already in line 1; give each row another id"),
        ('{"query": "x", "tags": "plain"}', ":2: `tags` must be a list"),
    ],
)
def test_bad_row_is_named_with_file_and_line(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path / "q.jsonl", '{"id": "one", "query": "fine"}', line)
    with pytest.raises(DatasetError) as caught:
        load_questions(path)
    assert str(caught.value).startswith(f"{path}{says}")
    assert "\n" not in str(caught.value)


def test_csv_row_with_too_few_cells_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "q.csv", "query,answer", "a,b", "c")
    with pytest.raises(DatasetError, match=r":3: fewer cells"):
        load_questions(path)


def test_wrong_column_name_suggests_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", '{"prompt": "x"}')
    with pytest.raises(DatasetError, match="did you mean 'prompt'"):
        load_questions(path, question_column="promt")


def test_missing_and_unknown_files_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no such file"):
        load_questions(tmp_path / "absent.jsonl")
    with pytest.raises(DatasetError, match=r"unknown kind '\.txt'"):
        load_questions(write(tmp_path / "q.txt", "x"))


def test_split_keeps_targets_apart_and_does_not_move() -> None:
    questions = general()
    split = split_questions(questions)
    assert len(split.test) >= 240
    trained = {target_key(question) for question in split.train}
    assert trained.isdisjoint(target_key(question) for question in split.test)
    fewer = split_questions(questions[::3])
    assert set(fewer.test) <= set(split.test)
    assert set(fewer.train) <= set(split.train)


def test_folds_keep_targets_apart_and_do_not_move() -> None:
    train = split_questions(general()).train
    folds = [validation_split(train, fold) for fold in range(FOLDS)]
    assert sorted(q.id for part in folds for q in part.validation) == sorted(q.id for q in train)
    assert [len(part.validation) for part in folds] == [174, 282, 185, 199, 208]
    for part in folds:
        assert len(part.train) + len(part.validation) == len(train)
        chosen_on = {target_key(question) for question in part.validation}
        learned = {target_key(question) for question in part.train}
        assert chosen_on.isdisjoint(learned)
    fewer = validation_split(train[::3], 2)
    assert set(fewer.validation) <= set(folds[2].validation)
    assert {fold_of(question) for question in fewer.train} == {0, 1, 3, 4}


def test_guard_requests_have_no_gold() -> None:
    guard = guard_questions()
    assert len(guard) >= 20
    assert all(not question.accept and question.reference is None for question in guard)


def test_a_csv_cell_may_be_long_and_a_quote_that_stays_open_loses_no_rows(tmp_path: Path) -> None:
    long = "why? " * 40_000
    path = write(tmp_path / "q.csv", "query,accept", f"{long},len", "how?,sum")
    assert [question.text for question in load_questions(path)] == [long.strip(), "how?"]
    path = write(tmp_path / "open.csv", "query,accept", '"why?,len', "how?,sum", "when?,abs")
    with pytest.raises(DatasetError, match="not CSV"):
        load_questions(path)


def test_a_column_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"q\.csv:1: column 'query' occurs twice"):
        load_questions(write(tmp_path / "q.csv", "query,accept,query", "a,b,c"))


@pytest.mark.parametrize("path", ["x" * 5000 + ".jsonl", "a/" * 3000 + "q.csv"])
def test_a_path_that_the_system_refuses_is_one_short_line(path: str) -> None:
    with pytest.raises(DatasetError, match="characters") as caught:
        load_questions(path)
    assert len(str(caught.value)) < 400


def test_a_parquet_page_that_does_not_match_its_checksum_is_an_error(tmp_path: Path) -> None:
    path, table = tmp_path / "q.parquet", pyarrow.table({"query": [f"what is {number}?" for number in range(10)]})
    parquet.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"what is 7?", b"what is 1?"))
    with pytest.raises(DatasetError, match="not a readable Parquet file"):
        load_questions(path)


def test_a_damaged_parquet_file_is_an_error_or_reads_as_some_questions(tmp_path: Path) -> None:
    path = tmp_path / "q.parquet"
    rows = [{"query": f"what is {number}?", "accept": ["len", "sum"], "id": number} for number in range(200)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=50)
    assert [question.id for question in load_questions(path)] == [str(number) for number in range(200)]
    content = path.read_bytes()
    rng, said = random.Random(0), list[str]()
    for _ in range(120):
        damaged = bytearray(content)
        start = rng.randrange(len(damaged))
        damaged[start : start + rng.randrange(1, 64)] = rng.randbytes(rng.randrange(0, 64))
        path.write_bytes(damaged)
        try:
            load_questions(path)
        except DatasetError as error:
            said.append(str(error))
    assert len(said) > 60
    assert all(line.startswith(str(path)) for line in said)


def test_an_answer_of_many_questions_is_not_what_they_are_about(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    rows = [{"query": f"Is {n} even?", "accept": ["yes" if n % 2 == 0 else "no"]} for n in range(200)]
    rows += [{"query": f"What sorts {n}?", "accept": ["sorted"]} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"query": f"Which of {n}?", "accept": ["B"]} for n in range(9)]
    rows += [{"query": f"How to sort, wording {n}?", "accept": ["list.sort"]} for n in range(60)]
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in rows))
    questions = load_questions(path)
    split = split_questions(questions)
    for part in (split.train, split.test):
        assert {question.accept[0] for question in part} >= {"yes", "no"}
    assert len({target_key(question) for question in questions[203:212]}) == 9
    assert {target_key(question) for question in questions[212:]} == {"list.sort"}
    assert {target_key(question) for question in questions[200:203]} == {"sorted"}


def test_an_answer_that_is_a_number_is_compared_as_one(tmp_path: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    path.write_text('{"query": "6 * 7?", "answer": 42.0}\n{"query": "name?", "answer": "Ann"}\n')
    assert [NUMERIC in question.tags for question in load_questions(path)] == [True, False]


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
