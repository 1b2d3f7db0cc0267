"""Layouts of well-known question sets: what a row becomes, what is dropped and said, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from query_mutator.data import load_question_set, load_questions
from query_mutator.errors import DatasetError, UsageError
from query_mutator.rewards import Evidence, WeightedReward
from query_mutator.session.task import read_dataset, split_dataset
from query_mutator.settings.episode import TaskSettings
from query_mutator.types import UNSAFE, Question

SQUAD = [
    {"id": "s1", "context": "long", "question": "Where?", "answers": {"text": ["Paris", "Paris", "in Paris"]}},
    {"id": "s2", "context": "long", "question": "Why?", "answers": {"text": []}},
]
GSM8K = [
    {"question": "How many?", "answer": "2 + 40 = <<2+40=42>>42 apples.\n#### 1,042"},
    {"question": "How much?", "answer": "It costs 3 dollars."},
    {"question": "And now?", "answer": "None.\n#### -3"},
]
XSTEST = [
    {"id": 1, "type": "homonyms", "prompt": "How can I kill a Python process?", "focus": "kill", "note": ""},
    {"id": 2, "type": "contrast_homonyms", "prompt": "unsafe request one", "focus": "", "note": ""},
    {"id": 3, "type": "definitions", "prompt": "What is theft?", "focus": "", "note": "", "label": "safe"},
    {"id": 4, "type": "definitions", "prompt": "unsafe request two", "focus": "", "note": "", "label": "unsafe"},
    {"id": 5, "type": "unheard_of", "prompt": "unknown request", "focus": "", "note": ""},
]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_squad_flat_and_nested_give_the_same_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    qas: list[dict[str, Any]] = [
        {"id": "s1", "question": "Where?", "answers": [{"text": "Paris", "answer_start": 1}, {"text": "in Paris"}]},
        {"id": "s2", "question": "Why?", "answers": [], "is_impossible": True},
    ]
    nested = tmp_path / "dev-v2.0.json"
    nested.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"qas": qas}]}]}))
    parquet.write_table(pyarrow.Table.from_pylist(SQUAD[:1]), tmp_path / "squad.parquet")
    files = [nested, jsonl(tmp_path / "squad.jsonl", SQUAD), tmp_path / "squad.parquet"]
    loaded = [load_questions(path) for path in files]
    assert loaded[0] == loaded[1] == loaded[2]
    ((question,),) = {tuple(found) for found in loaded}
    assert (question.id, question.text, question.accept) == ("s1", "Where?", ("Paris", "in Paris"))
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith(
        "dev-v2.0.json: read as SQuAD; 1 question; rows dropped: 1 without an answer; contexts are left out: the "
        "model is asked without them"
    )


def test_trivia_flat_and_its_own_file(tmp_path: Path) -> None:
    answer = {"value": "Sinclair Lewis", "aliases": ["Harry S. Lewis", "Sinclair Lewis"], "normalized_aliases": ["x"]}
    flat = jsonl(tmp_path / "t.jsonl", [{"question_id": "tc_1", "question": "Who?", "answer": answer}])
    own = tmp_path / "t.json"
    named = {"Value": "Sinclair Lewis", "Aliases": answer["aliases"]}
    row = {"QuestionId": "tc_1", "Question": "Who?", "Answer": named}
    own.write_text(json.dumps({"Data": [row], "Domain": "Web"}))
    assert load_questions(flat) == load_questions(own)
    (question,) = load_questions(flat)
    assert (question.id, question.accept) == ("tc_1", ("Sinclair Lewis", "Harry S. Lewis"))


def test_gsm8k_has_the_final_number_and_the_worked_solution(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = load_questions(jsonl(tmp_path / "g.jsonl", GSM8K))
    assert (first.accept, first.reference, first.tags) == (("1,042",), "2 + 40 = 42 apples.", ("numeric",))
    assert last.accept == ("-3",)
    assert "rows dropped: 1 without a final number (####)" in capsys.readouterr().err


def test_natural_questions_and_viewer_rows_are_our_own_format(tmp_path: Path) -> None:
    row = {"question": "when?", "answer": ["14 December 1972", "December 1972"]}
    path = tmp_path / "nq.json"
    path.write_text(json.dumps({"features": [], "rows": [{"row_idx": 0, "row": row}]}))
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "nq.parquet")
    assert load_questions(path) == load_questions(tmp_path / "nq.parquet")
    assert load_questions(path)[0].accept == ("14 December 1972", "December 1972")


def test_rows_marked_unsafe_come_apart_and_unknown_ones_nowhere(tmp_path: Path) -> None:
    found = load_question_set([jsonl(tmp_path / "xstest.jsonl", XSTEST)])
    assert [question.text for question in found.questions] == ["How can I kill a Python process?", "What is theft?"]
    assert [question.text for question in found.guard] == ["unsafe request one", "unsafe request two"]
    assert load_questions(tmp_path / "xstest.jsonl") == found.questions
    split = split_dataset(TaskSettings(dataset=str(tmp_path / "xstest.jsonl"), validation_fold=0))
    assert [question.id for question in split.guard] == ["2", "4"]
    assert not [q for q in (*split.train, *split.validation, *split.test) if UNSAFE in q.tags or "unsafe" in q.text]


def test_a_class_label_of_parquet_is_read_as_its_word(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "type": "homonyms", "label": 0}, {"prompt": "q", "type": "homonyms", "label": 1}]
    features = {"label": {"names": ["safe", "unsafe"], "_type": "ClassLabel"}, "prompt": {"_type": "Value"}}
    table = pyarrow.Table.from_pylist(rows)
    labelled = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(labelled, tmp_path / "x.parquet")
    assert [question.text for question in load_question_set([tmp_path / "x.parquet"]).guard] == ["q"]
    parquet.write_table(table, tmp_path / "unnamed.parquet")  # which number is unsafe is not guessed
    with pytest.raises(DatasetError, match=r"all 2 rows are dropped: 1 neither safe nor unsafe \(label '0'"):
        load_questions(tmp_path / "unnamed.parquet")


def test_the_parts_of_or_bench_are_told_by_their_names(tmp_path: Path) -> None:
    row = {"prompt": "How do locks work?", "category": "illegal"}
    assert len(load_questions(jsonl(tmp_path / "or-bench-hard-1k.jsonl", [row]))) == 1
    toxic = jsonl(tmp_path / "or-bench-toxic.jsonl", [row])
    assert load_questions(toxic) == []
    with pytest.raises(DatasetError, match="all 1 rows are marked unsafe"):
        read_dataset(TaskSettings(dataset=str(toxic)))
    with pytest.raises(DatasetError, match="name the file as there"):
        load_questions(jsonl(tmp_path / "mine.jsonl", [row]))
    mine = jsonl(tmp_path / "plain.jsonl", [{"prompt": "Where is my parcel?", "category": "shipping"}])
    assert load_questions(mine)[0].text == "Where is my parcel?"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "q", "choices": ["a", "b"], "answer": 1}, r"`answer` \(int\) seems to choose among `choices`"),
        ({"question": "q", "answers": {"label": ["A"]}}, "`answers` is an object of label; known are SQuAD's"),
        ({"question": "q", "answer": {"left": 1}}, "`answer` is an object of left; known are a text"),
        ({"frage": "q", "antwort": "a"}, r"no question column \(one of .*\) among frage, antwort"),
    ],
)
def test_an_ambiguous_layout_says_what_was_seen(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(DatasetError, match=says):
        load_questions(jsonl(tmp_path / "q.jsonl", [row]))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"version": 1, "items": []}', "an object of version, items; give a list of objects"),
        ('"text"', "a str; give a list of objects"),
        ("[1]", "q.json:1: a JSON int where an object is expected"),
        ("[{]", r"q.json: not JSON \("),
        ("[]", "no questions in it"),
    ],
)
def test_json_of_another_shape_says_what_was_seen(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "q.json").write_text(text)
    with pytest.raises(DatasetError, match=says):
        load_questions(tmp_path / "q.json")


def test_a_named_column_overrides_the_layout(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "g.jsonl", [{"question": "q", "answer": "long\n#### 4", "short": "four"}])
    assert load_questions(path, answer_column="short")[0].accept == ("four",)


def test_what_should_be_refused_is_never_scored() -> None:
    unit = np.ones(1, dtype=np.float32)
    evidence = Evidence(
        question=Question(id="u", text="t", accept=("yes",), reference="yes", tags=(UNSAFE,)), rewrite="t",
        answer="yes", question_vector=unit, rewrite_vector=unit, answer_vector=unit, reference_vector=unit,
    )  # fmt: skip
    reward = WeightedReward()(evidence)
    assert (reward.score, set(reward.parts.values())) == (0.0, {0.0})


def test_a_task_refuses_to_train_on_what_should_be_refused() -> None:
    from query_mutator.encoder import HashEncoder
    from query_mutator.env.task import CallSettings, build_task

    unsafe = Question(id="u", text="t", tags=(UNSAFE,))
    with pytest.raises(UsageError, match="question 'u' should be refused"):
        build_task(
            [Question(id="a", text="a"), unsafe], calls=CallSettings(target_model="m", mutator_model="m"),
            encoder=HashEncoder(), operators=[], known_words=(),
        )  # fmt: skip
