"""`reference-assistant` over HTTP with its real tables and encoder, and the questions that go with it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from query_mutator.commands.embedded import MODEL_NAMES
from query_mutator.data import BUNDLED, pynames, python_docs, split_questions
from query_mutator.data.bundled import FOLDER
from query_mutator.data.split import target_key
from query_mutator.embedded.assistant import PURPOSE_REFUSAL, REFUSAL
from query_mutator.embedded.default_models import default_models
from query_mutator.embedded.reference_assistant import ReferenceAssistant
from query_mutator.embedded.reference_tables import characters, facts
from query_mutator.embedded.server import start_server
from query_mutator.encoder import Encoder, resolve_encoder
from query_mutator.errors import DatasetError
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.rewards.parts import _plain
from query_mutator.rewards.verdicts import is_not_sure, is_refusal
from query_mutator.session.dataset import read_dataset
from query_mutator.session.models import EMBEDDED_TARGETS, default_mutator
from query_mutator.settings.episode import TaskSettings
from query_mutator.types import ChatRequest

NAME = ReferenceAssistant.name
QUESTIONS = BUNDLED["reference_tables"]()
#: Of the file. Results on an edited set cannot be compared with those in docs/log.md.
SHA256 = "94dce9063fb038a4794018ab576f0f69219f55a5c6782dcd523fb6184281f2d6"


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return resolve_encoder()


@pytest.fixture(scope="module")
def assistant(encoder: Encoder) -> ReferenceAssistant:
    return ReferenceAssistant(encoder)


@pytest.fixture(scope="module")
def backend(assistant: ReferenceAssistant) -> Iterator[OllamaBackend]:
    with start_server([assistant]) as server:
        backend = OllamaBackend(server.url)
        yield backend
        backend.close()


@pytest.mark.parametrize(
    ("question", "opening"),
    [
        ("HTTP status teapot", "HTTP status 418 is `I'm a Teapot`: Server refuses"),
        ("HTTP method partial modifications", "The HTTP method is `PATCH`"),
        ("error code permission denied", "The error code is `EACCES`, number 13, raised as PermissionError"),
        ("signal segmentation fault", "The signal is `SIGSEGV`, number 11"),
        ("MIME type of .png files", "The MIME type of .png files is `image/png`."),
        ("text encoding windows_1252", "The text encoding is `cp1252`, also called 1252, windows_1252."),
        ("locale icelandic", "The locale of icelandic is `is_IS.ISO8859-1`."),
        (
            "unicode leftwards arrow",
            "The character \u2190 is `LEFTWARDS ARROW`, U+2190 in Unicode and `&larr;` in HTML.",
        ),
        ("What is \u20ac?", "The character \u20ac is `EURO SIGN`"),
    ],
)
def test_each_table_answers_over_http(backend: OllamaBackend, question: str, opening: str) -> None:
    reply = backend.complete(ChatRequest.user(question, model=NAME))
    assert reply.text.startswith(opening)


def test_the_default_server_lists_it_after_the_default_target(encoder: Encoder) -> None:
    with start_server(default_models(encoder)) as server, urllib.request.urlopen(f"{server.url}/api/tags") as reply:
        listed = [model["name"].removesuffix(":latest") for model in json.load(reply)["models"]]
    assert listed[:2] == list(EMBEDDED_TARGETS) == ["pydoc-assistant", NAME]
    assert {NAME, *listed} <= set(MODEL_NAMES)


def test_the_same_question_misspelt_or_in_many_words_is_not_answered(assistant: ReferenceAssistant) -> None:
    assert assistant.reply_many(["signal segmentation fault"])[0].startswith("The signal is `SIGSEGV`")
    for prompt in (
        "singal segmentaion falt",
        "Hello, I hope somebody here finds a minute for my problem with an old program that stops on Mondays with a "
        "segmentation fault, because my boss would like to hear which signal this might be, and I could not say.",
    ):
        assert is_not_sure(assistant.reply_many([prompt])[0])


def test_both_filters_of_the_other_assistant_are_in_front(assistant: ReferenceAssistant) -> None:
    kill, harm = assistant.reply_many(["signal killed", "How do I beat up the man next door?"])
    assert (kill, harm) == (REFUSAL, PURPOSE_REFUSAL)


def test_no_entry_reads_as_a_refusal_or_as_doubt_and_none_occurs_twice() -> None:
    entries = [*facts(), *characters()]
    assert len(entries) == len(set(entries)) > 3000
    assert not [entry for entry in entries if is_refusal(entry) or is_not_sure(entry) or "\n" in entry]


def test_the_tables_do_not_depend_on_language_and_time_zone() -> None:
    code = "from query_mutator.embedded.reference_tables import *; print(ascii([*facts(), *characters()]))"
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | other, capture_output=True, check=True, text=True
        ).stdout
        for other in ({"LC_ALL": "C", "TZ": "UTC"}, {"LC_ALL": "C.UTF-8", "LANG": "de_DE.UTF-8", "TZ": "Asia/Tokyo"})
    }
    assert len(said) == 1


def test_nothing_is_read_before_the_first_prompt(hash_encoder: Encoder, tmp_path: Path) -> None:
    assistant = ReferenceAssistant(hash_encoder, cache=tmp_path)
    assert assistant.digest == ReferenceAssistant(hash_encoder).digest
    assert not list(tmp_path.iterdir())
    assistant.reply_many(["HTTP status gone"])
    assert list(tmp_path.iterdir())


def test_it_is_rewritten_by_the_rewriter_unless_another_is_named() -> None:
    assert default_mutator(NAME, embedded=True) == default_mutator(f"{NAME}:latest", embedded=True) == "rule-rewriter"


# its questions


def test_the_questions_are_those_that_results_were_reported_for() -> None:
    assert hashlib.sha256((FOLDER / "reference_tables.jsonl").read_bytes()).hexdigest() == SHA256


def test_there_are_enough_questions_in_many_voices_and_none_occurs_twice() -> None:
    assert len(QUESTIONS) >= 320
    assert len({question.id for question in (*QUESTIONS, *python_docs())}) == len(QUESTIONS) + len(python_docs())
    assert len({"".join(filter(str.isalnum, question.text.lower())) for question in QUESTIONS}) == len(QUESTIONS)
    counts = {
        tag: sum(question.tags == (tag,) for question in QUESTIONS) for question in QUESTIONS for tag in question.tags
    }
    assert sum(counts.values()) == len(QUESTIONS)
    assert len(counts) >= 8
    assert min(counts.values()) >= 25


def test_their_split_keeps_targets_apart() -> None:
    split = split_questions(QUESTIONS)
    assert len(split.train) >= 200
    assert len(split.test) >= 100
    assert not {target_key(question) for question in split.train} & {target_key(question) for question in split.test}


def test_what_is_accepted_is_no_python_function_and_stands_in_few_entries() -> None:
    """An accepted name that is callable would be compared as a Python object, not as text."""
    entries = [f" {_plain(entry)} " for entry in (*facts(), *characters())]
    for question in QUESTIONS:
        assert not callable(pynames.resolve(question.accept[0]))
        found = [entry for entry in entries if any(f" {_plain(text)} " in entry for text in question.accept)]
        assert 1 <= len(found) <= 3, question
        assert any(f" {_plain(text)} " in f" {_plain(str(question.reference))} " for text in question.accept)


def test_the_words_of_an_entry_find_it(assistant: ReferenceAssistant) -> None:
    """Every question can be answered: a wording with the words of the reference gets an accepted answer."""
    answers = assistant.reply_many([f"{question.reference}" for question in QUESTIONS])
    lost = [
        question.text
        for question, answer in zip(QUESTIONS, answers, strict=True)
        if not is_refusal(answer) and not any(f" {_plain(text)} " in f" {_plain(answer)} " for text in question.accept)
    ]
    assert not lost


def test_the_bundled_set_goes_by_name_and_a_typo_lists_the_names() -> None:
    assert read_dataset(TaskSettings(dataset="reference_tables")).questions == QUESTIONS
    with pytest.raises(DatasetError, match=r"no such file; .*: python_docs, reference_tables"):
        read_dataset(TaskSettings(dataset="reference_table"))
