"""Tasks of the package `reasoning-gym` as questions: `reasoning-gym:NAME,NAME(size=50,seed=1)`.

The id of a question, `NAME(options)#INDEX`, is all that generating its entry again takes, so records do not carry the
entry's metadata; `entry_of` returns the entry with its task, whose `score_answer` verifies an answer.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import itertools
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from query_mutator.errors import DatasetError, UsageError, reason_of
from query_mutator.registry import check_known
from query_mutator.types import REASONING_GYM, Question

__all__ = ["PREFIX", "UNSTABLE", "AnswerKind", "Entry", "entry_of", "extract_answer", "tasks_of", "verified_questions"]

AnswerKind: TypeAlias = Literal["number", "word", "text"]
PREFIX = f"{REASONING_GYM}:"
SIZE, SEED = 100, 0  # of a task without these options
#: Tasks whose entries differ from one process to the next (0.1.25): a run with them cannot be resumed or repeated.
UNSTABLE = frozenset(
    {"isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
_PROBED = 8  # entries of a task whose scorer is tried
GUESSES = ("I don't know.", "0")  # each is wrong for at least some entries
_ALMOST = math.nextafter(1, 0)
_RUNNING = frozenset({"eval", "exec", "parse_expr", "sympify", "Fraction"})  # `Fraction("1e999999999")` does not end
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", re.IGNORECASE)
_FORM = f"{PREFIX}NAME,NAME(size=50, seed=1)"
_TASKS, _ENTRIES = 128, 1 << 12  # that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a task: its question, an example of a right answer, and all that the task's scorer reads."""

    task: Any  # reasoning_gym's ProceduralDataset
    fields: Mapping[str, Any]  # question, answer, metadata

    @property
    def answer(self) -> str | None:
        """Return a right answer, None for a task that has none."""
        answer = self.fields["answer"]
        return None if answer is None else str(answer)

    @property
    def kind(self) -> AnswerKind:
        """Return what the answers of the task's first entries are."""
        return _kind(self.task)

    @property
    def run_by(self) -> frozenset[str]:
        """Return the functions with which the task's scorer may run an answer as Python code."""
        return _RUNNING.intersection(type(self.task).score_answer.__code__.co_names)

    def score(self, answer: str) -> float:
        """Return the score of the task's own scorer in [0, 1]; 0 for an answer that it cannot read."""
        with _quiet():
            try:
                score = float(self.task.score_answer(answer, self.fields))
            except Exception:  # scorers convert answers without checking them first
                return 0.0
        return score if 0 <= score <= 1 else 0.0 if not score > 1 else _ALMOST  # a sum of partial credits, rounded up


def verified_questions(spec: str) -> list[Question]:
    """Return the questions of `reasoning-gym:NAME,NAME(size=50,seed=1)`, in the order of tasks and entries.

    Each has the tags `reasoning-gym`, the task's name and its kind. DatasetError for an unknown task or option, and
    for a task whose entries are not stable or whose scorer accepts wrong answers.
    """
    questions: list[Question] = []
    names = tasks_of(spec)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DatasetError(f"{spec[:200]}: {twice} occurs twice; give one another seed")
    for name in names:
        questions += _questions(name)
    return questions


def tasks_of(spec: str) -> list[str]:
    """Return each task of a spec as `NAME(seed=0,size=100)`, its options in order; DatasetError for another form."""
    try:
        calls = ast.parse(f"[{spec.removeprefix(PREFIX)}]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise DatasetError(f"{spec[:200]}: not {_FORM}") from None
    if not isinstance(calls, ast.List) or not calls.elts:
        raise DatasetError(f"{spec[:200]}: not {_FORM}")
    return [_task(call, spec) for call in calls.elts]


def _task(call: ast.expr, spec: str) -> str:
    """Return one task of a spec, checked."""
    options: dict[str, Any] = {"seed": SEED, "size": SIZE}
    name = call.func if isinstance(call, ast.Call) else call
    if not isinstance(name, ast.Name) or (isinstance(call, ast.Call) and call.args):
        raise DatasetError(f"{spec[:200]}: {ast.unparse(call)[:80]} is not a task; write {_FORM}")
    for option in call.keywords if isinstance(call, ast.Call) else ():
        value = option.value
        try:
            options[str(option.arg)] = value.id if isinstance(value, ast.Name) else ast.literal_eval(value)
        except ValueError:
            raise DatasetError(f"{spec[:200]}: {ast.unparse(value)[:80]} is not a value of {option.arg}") from None
    _check(name.id, options)
    return f"{name.id}({','.join(f'{key}={value!r}' for key, value in sorted(options.items()))})"


def _check(name: str, options: Mapping[str, Any]) -> None:
    """Raise for a task or option that the package does not have, and for values of size and seed that it cannot use."""
    known = {key: config for key, (_, config) in _package().factory.DATASETS.items() if key != "composite"}
    check_known("task of reasoning-gym", name, known)
    check_known(
        f"option of {name}",
        next((key for key in options if key not in _options(known[name])), "size"),
        _options(known[name]),
    )
    for key, least in (("size", 1), ("seed", 0)):
        if type(options[key]) is not int or options[key] < least:
            raise DatasetError(f"{name}: {key}={options[key]!r} must be a whole number from {least}")
    if name in UNSTABLE:
        raise DatasetError(f"{name}: its entries differ from one process to the next, so no run could be repeated")


def _options(config: type) -> list[str]:
    return [field.name for field in fields(config)]


def _questions(name: str) -> list[Question]:
    """Return the questions of one task."""
    task = _dataset(name)
    with _quiet():
        entries = [Entry(task=task, fields=task[index]) for index in range(len(task))]
    _check_scorer(name, entries[:_PROBED])
    tags = (REASONING_GYM, name.partition("(")[0], task.category)
    return [_question(f"{name}#{index}", entry, tags) for index, entry in enumerate(entries)]


def _question(id_: str, entry: Entry, tags: tuple[str, ...]) -> Question:
    text = str(entry.fields["question"]).strip()
    about = f"{tags[1]} {hashlib.sha256(text.encode()).hexdigest()[:16]}"  # equal entries are in one part of the split
    accept = (entry.answer,) if entry.answer else ()
    return Question(id=id_, text=text, accept=accept, reference=entry.answer or None, tags=tags, about=about)


def _check_scorer(name: str, entries: list[Entry]) -> None:
    """Raise for a scorer that gives full marks to most answers of other entries, or to one guess for most entries."""
    pairs = itertools.pairwise(entries)
    trials = [[(one, other.answer) for one, other in pairs if other.answer and other.answer != one.answer]]
    trials += [[(one, guess) for one in entries if one.answer != guess] for guess in GUESSES]
    if any(2 * sum(entry.score(answer) >= 1 for entry, answer in trial) > len(trial) for trial in trials):
        raise DatasetError(f"{name}: its scorer gives full marks to wrong answers; choose another task")


def entry_of(question: Question) -> Entry:
    """Return the entry that a question was made from; DatasetError where the package now generates another one."""
    entry = _entry(question.id)
    if str(entry.fields["question"]).strip() != question.text:
        raise DatasetError(f"question {question.id} is another one in the reasoning-gym that is installed; install its")
    return entry


@lru_cache(maxsize=_ENTRIES)
def _entry(id_: str) -> Entry:
    name, mark, index = id_.rpartition("#")
    if not mark or not index.isdecimal():
        raise DatasetError(f"question {id_[:80]} is not an entry of reasoning-gym")
    task = _dataset(tasks_of(name)[0])
    with _quiet():
        return Entry(task=task, fields=task[int(index)])


@lru_cache(maxsize=_TASKS)
def _dataset(name: str) -> Any:
    """Return the task written as `NAME(options)`; DatasetError for a value that it cannot use."""
    call = ast.parse(name, mode="eval").body
    assert isinstance(call, ast.Call)
    options = {str(option.arg): ast.literal_eval(option.value) for option in call.keywords}
    try:
        with _quiet():
            return _package().create_dataset(ast.unparse(call.func), **options)
    except Exception as error:  # the package's own checks are asserts
        raise DatasetError(f"{name}: not possible ({reason_of(error)}); choose other options") from None


@lru_cache(maxsize=_TASKS)
def _kind(task: Any) -> AnswerKind:
    with _quiet():
        answers = [str(task[index]["answer"] or "no answer") for index in range(min(_PROBED, len(task)))]
    if all(map(_NUMBER.fullmatch, answers)):
        return "number"
    return "word" if all(len(answer.split()) == 1 for answer in answers) else "text"


def extract_answer(reply: str) -> str | None:
    """Return what stands between the last `<answer>` and `</answer>` of a reply, None without."""
    answer: str | None = _package().utils.extract_answer(reply)
    return answer


def _package() -> Any:
    """Return the module `reasoning_gym`; UsageError without it."""
    try:
        import reasoning_gym
        import reasoning_gym.factory
        import reasoning_gym.utils
    except ImportError as error:
        raise UsageError(
            f"--dataset {PREFIX}NAME needs reasoning-gym ({error}); pip install 'query-mutator[reasoning-gym]'"
        ) from None
    return reasoning_gym


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what tasks print and warn of out of a command's output."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
