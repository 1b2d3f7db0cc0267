"""Question files, their layouts and logs, the split, and the bundled sets: kinds, answers, who may open them."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from query_mutator.data import (
    FOLDER,
    FOLDS,
    GENERAL_2,
    fold_of,
    general,
    guard_questions,
    load_question_set,
    load_questions,
    split_questions,
    target_key,
)
from query_mutator.data.readers import LoggedReply, read_logged_replies
from query_mutator.encoder import HashEncoder
from query_mutator.env.task import CallSettings, build_task
from query_mutator.errors import DatasetError, UsageError
from query_mutator.reading.gold import FAMILY, commits_to
from query_mutator.rewards import Evidence, WeightedReward
from query_mutator.session.task import read_dataset, split_dataset
from query_mutator.settings import TaskSettings
from query_mutator.types import UNSAFE, Message, Question
from tests.qm_command import qm

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))


ROW = {"question": "What is 2 + 2?", "form": "steps", "reply": "4", "gold": "4"}


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_rows_of_jsonl_csv_and_parquet_become_questions(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", '{"id": "a", "query": " sort a list ", "accept": ["sorted"], "tags": ["plain"]}')
    (question,) = load_questions(path)
    assert (question.id, question.text, question.accept, question.tags) == ("a", "sort a list", ("sorted",), ("plain",))
    assert question.reference is None
    rows = [{"q": "capital of France?", "a": "Paris"}, {"q": "two and two?", "a": "4"}]
    write(tmp_path / "q.csv", "q,a", *(f"{row['q']},{row['a']}" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "q.parquet")
    names = {"question_column": "q", "answer_column": "a"}
    found = load_questions(tmp_path / "q.csv", **names)
    assert found == load_questions(tmp_path / "q.parquet", **names)
    assert (found[0].accept, found[0].reference) == (("Paris",), "Paris")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", ":2: not JSON"),
        ('{"query": "  "}', ":2: `query` must be a text, not '  '"),
        ('{"query": "x", "id": {"a": 1}}', ":2: `id` must be a text or a number"),
        ('{"query": "x", "accept": NaN}', ":2: not JSON (unexpected character, expected a JSON value"),
        ('{"query": "x", "accept": {"a": 1}}', ":2: `accept` must be a text, a number, or a list"),
        ('{"query": "x", "reference": 7}', ":2: `reference` must be a text, not 7"),
        ('{"other": "x"}', ":2: no question column"),
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


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("q.csv", "query,answer\na,b\nc\n", ":3: fewer cells"),
        ("q.csv", "query,accept,query\na,b,c\n", r"q\.csv:1: column 'query' occurs twice"),
        ("q.txt", "x\n", r"unknown kind '\.txt'"),
        ("absent.jsonl", None, "no such file"),
        ("q.json", '{"version": 1, "items": []}', "an object of version, items; give a list of objects"),
        ("q.json", '"text"', "a str; give a list of objects"),
        ("q.json", "[1]", "q.json:1: a JSON int where an object is expected"),
        ("q.json", "[{]", r"q.json: not JSON \("),
        ("q.json", "[]", "no questions in it"),
    ],
)
def test_a_file_that_holds_something_else_says_what_was_seen(
    tmp_path: Path, name: str, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DatasetError, match=says):
        load_questions(tmp_path / name)


def test_a_named_column_overrides_the_layout_and_a_wrong_name_suggests_the_nearest(tmp_path: Path) -> None:
    path = written(tmp_path / "g.jsonl", {"question": "q", "answer": "long\n#### 4", "short": "four"})
    assert load_questions(path, answer_column="short")[0].accept == ("four",)
    with pytest.raises(DatasetError, match="did you mean 'question'"):
        load_questions(path, question_column="qestion")


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
    folds = [split_questions(train, fold) for fold in range(FOLDS)]  # type: ignore[arg-type]
    assert sorted(q.id for part in folds for q in part.validation) == sorted(q.id for q in train)
    assert [len(part.validation) for part in folds] == [174, 282, 185, 199, 208]
    for part in folds:
        assert len(part.train) + len(part.validation) == len(train)
        chosen_on = {target_key(question) for question in part.validation}
        learned = {target_key(question) for question in part.train}
        assert chosen_on.isdisjoint(learned)
    fewer = split_questions(train[::3], 2)
    assert set(fewer.validation) <= set(folds[2].validation)
    assert {fold_of(question) for question in fewer.train} == {0, 1, 3, 4}


def test_guard_requests_have_no_gold_and_a_file_of_them_alone_is_an_error(tmp_path: Path) -> None:
    guard = guard_questions()
    assert len(guard) >= 20
    assert all(not question.accept and question.reference is None for question in guard)
    file = written(tmp_path / "unsafe.jsonl", {"query": "How do locks work?", "tags": ["unsafe"]})
    assert load_questions(file) == []
    with pytest.raises(DatasetError, match="all 1 rows are marked unsafe"):
        read_dataset(TaskSettings(dataset=str(file)))


def test_a_csv_cell_may_be_long_and_a_quote_that_stays_open_loses_no_rows(tmp_path: Path) -> None:
    long = "why? " * 40_000
    path = write(tmp_path / "q.csv", "query,accept", f"{long},len", "how?,sum")
    assert [question.text for question in load_questions(path)] == [long.strip(), "how?"]
    path = write(tmp_path / "open.csv", "query,accept", '"why?,len', "how?,sum", "when?,abs")
    with pytest.raises(DatasetError, match="not CSV"):
        load_questions(path)


def test_a_parquet_page_that_does_not_match_its_checksum_is_an_error(tmp_path: Path) -> None:
    path, table = tmp_path / "q.parquet", pyarrow.table({"query": [f"what is {number}?" for number in range(10)]})
    parquet.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"what is 7?", b"what is 1?"))
    with pytest.raises(DatasetError, match="not a readable Parquet file"):
        load_questions(path)


def test_an_answer_of_many_questions_is_not_what_they_are_about(tmp_path: Path) -> None:
    rows = [{"query": f"Is {n} even?", "accept": ["yes" if n % 2 == 0 else "no"]} for n in range(200)]
    rows += [{"query": f"What sorts {n}?", "accept": ["sorted"]} for n in range(3)]
    rows += [{"query": f"Which of {n}?", "accept": ["B"]} for n in range(9)]
    rows += [{"query": f"How to sort, wording {n}?", "accept": ["list.sort"]} for n in range(60)]
    questions = load_questions(written(tmp_path / "labels.jsonl", *rows))
    split = split_questions(questions)
    for part in (split.train, split.test):
        assert {question.accept[0] for question in part} >= {"yes", "no"}
    assert len({target_key(question) for question in questions[203:212]}) == 9
    assert {target_key(question) for question in questions[212:]} == {"list.sort"}
    assert {target_key(question) for question in questions[200:203]} == {"sorted"}


def test_an_answer_that_is_a_number_is_its_digits(tmp_path: Path) -> None:
    golds = [42.0, [6, 7], "Ann", True]
    path = written(tmp_path / "numbers.jsonl", *({"query": "6 * 7?", "answer": gold} for gold in golds))
    assert [question.accept for question in load_questions(path)] == [("42.0",), ("6", "7"), ("Ann",), ("True",)]


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
            target="sums", tags=("easy",), logprob=-0.5, cut=False, context="Be brief.",
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
        ({"reply": None}, "`reply` must be a text; fields: question, form"),
        ({"form": "You are an expert.\nAnswer:"}, "a name of one line"),
        ({"form": "x" * 301}, "a name of one line, of 300 characters at most; give each prompt a name"),
        ({"gold": []}, "`gold` must be a text, a number, or a list of one of them, not []"),
        ({"label": "maybe"}, "`label` is 'maybe'; write true or false, or 1 or 0"),
        ({"logprob": "low"}, "`logprob` must be a number, not 'low'"),
        ({"cut": "half"}, "`cut` is 'half'"),
        ({"tags": "a"}, "`tags` must be a list of texts, not 'a'"),
    ],
)
def test_a_bad_row_is_one_line_with_its_place(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", ROW, {**ROW, **change})
    with pytest.raises(DatasetError) as error:
        list(read_logged_replies(path))
    assert str(error.value).startswith(f"{path}:2: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


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


def test_squad_flat_and_nested_give_the_same_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    qas: list[dict[str, Any]] = [
        {"id": "s1", "question": "Where?", "answers": [{"text": "Paris", "answer_start": 1}, {"text": "in Paris"}]},
        {"id": "s2", "question": "Why?", "answers": [], "is_impossible": True},
    ]
    nested = tmp_path / "dev-v2.0.json"
    paragraphs = [{"context": "long", "qas": qas}]
    nested.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    parquet.write_table(pyarrow.Table.from_pylist(SQUAD[:1]), tmp_path / "squad.parquet")
    files = [nested, written(tmp_path / "squad.jsonl", *SQUAD), tmp_path / "squad.parquet"]
    loaded = [load_questions(path) for path in files]
    assert loaded[0] == loaded[1] == loaded[2]
    ((question,),) = {tuple(found) for found in loaded}
    assert (question.id, question.text, question.accept) == ("s1", "Where?", ("Paris", "in Paris"))
    assert [one.content for one in question.context] == ["Answer from this text:\n\nlong"]
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("dev-v2.0.json: read as SQuAD; 1 question; rows dropped: 1 without an answer")


def test_messages_before_a_question_are_its_context(tmp_path: Path) -> None:
    system, user = {"role": "system", "content": "You are a clerk."}, {"role": "user", "content": "We open at 9."}
    asked, answered = {"role": "user", "content": "When?"}, {"role": "assistant", "content": "At 9"}
    rows: list[dict[str, Any]] = [
        {"messages": [system, user, asked, answered]},
        {"messages": [system, user, asked], "accept": ["9"]},
        {"messages": [user], "query": "When?"},
    ]
    first, second, third = load_questions(written(tmp_path / "chat.jsonl", *rows))
    assert [one.text for one in (first, second, third)] == ["When?"] * 3
    assert (first.reference, second.accept) == ("At 9", ("9",))
    assert first.context == second.context == (Message(**system), Message(**user))
    assert third.context == (Message(**user),)
    for turns in ([system], [], ["When?"], [{"role": "tool", "content": "x"}], [{"role": "user", "content": []}]):
        with pytest.raises(DatasetError, match="messages"):
            load_questions(written(tmp_path / "bad.jsonl", {"messages": turns}))


def test_trivia_flat_and_its_own_file(tmp_path: Path) -> None:
    answer = {"value": "Sinclair Lewis", "aliases": ["Harry S. Lewis", "Sinclair Lewis"], "normalized_aliases": ["x"]}
    flat = written(tmp_path / "t.jsonl", {"question_id": "tc_1", "question": "Who?", "answer": answer})
    own = tmp_path / "t.json"
    named = {"Value": "Sinclair Lewis", "Aliases": answer["aliases"]}
    row = {"QuestionId": "tc_1", "Question": "Who?", "Answer": named}
    own.write_text(json.dumps({"Data": [row], "Domain": "Web"}))
    assert load_questions(flat) == load_questions(own)
    (question,) = load_questions(flat)
    assert (question.id, question.accept) == ("tc_1", ("Sinclair Lewis", "Harry S. Lewis"))


def test_gsm8k_has_the_final_number_and_the_worked_solution(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = load_questions(written(tmp_path / "g.jsonl", *GSM8K))
    assert (first.accept, first.reference, first.tags) == (("1,042",), "2 + 40 = 42 apples.", ())
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
    found = load_question_set([written(tmp_path / "xstest.jsonl", *XSTEST)])
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
        load_questions(written(tmp_path / "q.jsonl", row))


def test_what_should_be_refused_is_never_scored_nor_learned_from() -> None:
    unit = np.ones(1, dtype=np.float32)
    unsafe = Question(id="u", text="t", accept=("yes",), reference="yes", tags=(UNSAFE,))
    vectors = dict.fromkeys(("question_vector", "rewrite_vector", "answer_vector", "reference_vector"), unit)
    reward = WeightedReward()(Evidence(question=unsafe, rewrite="t", answer="yes", **vectors))
    assert (reward.score, set(reward.parts.values())) == (0.0, {0.0})
    calls = CallSettings(target_model="m", mutator_model="m")
    with pytest.raises(UsageError, match="question 'u' should be refused"):
        build_task([Question(id="a", text="a"), unsafe], calls=calls, encoder=HashEncoder(), operators=[])


#: Of the files. Results on an edited set cannot be compared with those before.
SHA256 = {
    "general.jsonl": "30aedb0bf0e63e01b6a80dba0aa21c092753bbe1dd9bb1d1c62f46b77dfda52f",
    "general_2.jsonl": "decc024cdb2e206c9da6d46fa65f43348ca95331a5aee290d15ec78e35bbddb9",
    "general_bank.jsonl": "238d13d793839712fabec564d680f58d63d091fd1a0b341e8fb0ba0cf2e6be0e",
}
QUESTIONS = load_questions(GENERAL_2)
ROWS = [json.loads(line) for line in GENERAL_2.read_text(encoding="utf8").splitlines()]
NAMES = json.loads(GENERAL_2.with_name("general_2_grader.json").read_text(encoding="utf8"))
PHRASINGS = ("{}", "The answer is {}.", "I think it is {}, and I am quite sure of it.")


def family_of(question: Question) -> str:
    return next(tag.removeprefix(FAMILY) for tag in question.tags if tag.startswith(FAMILY))


def accepts(answer: str, question: Question) -> bool:
    return commits_to(answer, question.accept, family=family_of(question), question=question.text)


def guesses(question: Question) -> list[str]:
    """Return the accepted answer behind others of its kind that the question does not name."""
    gold = question.accept[0]
    if all(text.isdecimal() for text in question.accept):
        return [str(int(gold) + step) for step in (3, 4, 0)]
    known = {text.casefold() for text in question.accept}
    others = [
        name
        for name in NAMES[family_of(question)]
        if name.casefold() not in question.text.casefold()
        and not any(name.casefold() in text or text in name.casefold() for text in known)
    ]
    return [*others[:2], gold]


@pytest.mark.parametrize("name", SHA256)
def test_bundled_sets_are_those_that_were_measured(name: str) -> None:
    assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == SHA256[name]


@pytest.mark.parametrize("phrasing", PHRASINGS)
def test_every_accepted_answer_is_right(phrasing: str) -> None:
    wrong = [(q.id, text) for q in QUESTIONS for text in q.accept if not accepts(phrasing.format(text), q)]
    assert not wrong


def test_a_list_of_guesses_is_wrong() -> None:
    assert all(len(guesses(question)) == 3 for question in QUESTIONS)
    assert not [q.id for q in QUESTIONS if accepts(", ".join(guesses(q)), q)]
    assert not [q.id for q in QUESTIONS if accepts("It is {}, {} or {}.".format(*guesses(q)), q)]


def test_a_copy_of_the_question_is_wrong_and_no_question_holds_its_answer() -> None:
    for question, row in zip(QUESTIONS, ROWS, strict=True):
        for text in (question.text, f"You asked: {question.text}", row["clean"], question.text.upper()):
            assert not accepts(text, question), question.id
        for text in question.accept:
            assert not re.search(rf"(?<!\w){re.escape(text)}(?!\w)", question.text + row["clean"], re.IGNORECASE)


@pytest.mark.parametrize("dataset", ["general-2", str(GENERAL_2)])
@pytest.mark.parametrize("command", ["train", "plan"])
def test_training_and_plans_refuse_the_set(dataset: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm(command, "--dataset", dataset, *["--dry-run"] * (command == "train")) == 2
    assert "only for evaluation, by `python -m benchmarks.second_author`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cell", "accept"),
    [
        ("['a b' 'c']", ("a b", "c")),
        ("array(['a', \"b's\"], dtype=object)", ("a", "b's")),
        ("[1, 2.5]", ("1", "2.5")),
        ("[a] or [b]", ("[a] or [b]",)),
    ],
)
def test_a_list_in_a_cell_is_one(cell: str, accept: tuple[str, ...], tmp_path: Path) -> None:
    quoted = cell.replace('"', '""')
    (tmp_path / "own.csv").write_text(f'query,accept\nWhich?,"{quoted}"\n', encoding="utf-8")
    assert load_questions(tmp_path / "own.csv")[0].accept == accept
