"""What a result may say: held-out questions are new, equal methods are equal, and lost refusals are reported."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ollama_utils
from tests.promises import helpers
from tests.promises.helpers import QM, TRAIN, ModelServer, good, rows_of, run
from tests.promises.model_server import SHELF

TEMPLATES = ("plz tell me the {} umm", "umm what {} lol", "which {} is it thx")
UNSAFE = ("bone", "organ", "desert", "animal")


@dataclass
class Trained:
    """A run with periodic evaluations and the comparison at its end, and what its server was asked in order."""

    home: Path
    folder: Path
    server: ModelServer
    output: str
    prompts: list[tuple[str, str]]
    held_out: list[str]

    @property
    def dataset(self) -> Path:
        """The questions of the run."""
        return self.home / "questions.jsonl"


@pytest.fixture(scope="module")
def trained_with_evaluation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Train and compare."""
    home = tmp_path_factory.mktemp("honest")
    rows: list[dict[str, Any]] = [
        {"id": f"{word}{n}", "query": template.format(word), "accept": [name]}
        for word, name in SHELF.items()
        for n, template in enumerate(TEMPLATES)
    ]
    rows += [{"id": f"unsafe-{word}", "query": f"kill the {word}", "tags": ["unsafe"]} for word in UNSAFE]
    with helpers.model_server() as server:
        flags = helpers.train_flags(server, home)
        flags[flags.index("--eval-interval") + 1] = "1"
        flags[flags.index("--operators") + 1] = "neutral,filler"
        flags.remove("--no-evaluate")
        helpers.write_questions(home / "questions.jsonl", rows)
        flags += ["--eval-questions", "10", "--plan-calls", "60", "--encoder", "hash"]
        done = good(run([*TRAIN, *flags], cwd=home))
        folder = helpers.latest(home)
        tests = [row for row in rows_of(folder / "evaluation.jsonl") if row["set"] == "test"]
        texts = sorted({row["question"] for row in tests})
        prompts = server.prompts
        yield Trained(home, folder, server, done.stdout, prompts, texts)


def with_any(texts: Sequence[str], prompts: Sequence[tuple[str, str]]) -> list[int]:
    """Return the places of the prompts that have one of the texts in them."""
    return [place for place, (_, prompt) in enumerate(prompts) if any(text in prompt for text in texts)]


def test_held_out_questions_are_asked_once_and_at_the_end(trained_with_evaluation: Trained) -> None:
    """No held-out question reaches a model before the end, and then each is asked once."""
    run_, texts = trained_with_evaluation, trained_with_evaluation.held_out
    assert len(texts) >= 20
    first = with_any(texts, run_.prompts)[0]
    summary = json.loads((run_.folder / "summary.json").read_text())
    validated = [row for row in rows_of(run_.folder / "metrics.jsonl") if "validation/success" in row]
    assert len(validated) == 3
    assert first >= summary["llm_calls"]
    assert first > 64
    steps = {row["question"] for row in rows_of(run_.folder / "transcripts.jsonl")}
    assert not steps.intersection(texts)
    asked = Counter(prompt for model, prompt in run_.prompts if model == "librarian")
    assert {text: asked[text] for text in texts} == dict.fromkeys(texts, 1)


def test_a_search_for_a_plan_asks_no_held_out_question(trained_with_evaluation: Trained) -> None:
    """`qm plan` finds its plan without sending a held-out question or a request that should be refused to any model."""
    run_ = trained_with_evaluation
    run_.server.reset()
    flags = [*helpers.server_flags(run_.server), "--dataset", run_.dataset, "--operators", "neutral,filler"]
    flags += ["--forms", "none", "--answer", "searched", "--reward", "right=1", "--encoder", "hash"]
    flags += ["--max-calls", "200", "--cache", "off", "--save-dir", run_.home / "plans"]
    good(run([*QM, "plan", *flags], cwd=run_.home))
    prompts = run_.server.prompts
    assert len(prompts) > 20
    assert with_any([*run_.held_out, *(f"kill the {word}" for word in UNSAFE)], prompts) == []


def test_two_copies_of_a_method_are_not_clearly_different(trained_with_evaluation: Trained, tmp_path: Path) -> None:
    """`qm compare` finds no clear difference between a run and its copy, nor between random play with two seeds."""
    run_ = trained_with_evaluation
    shutil.copytree(run_.folder, tmp_path / "copy")
    said = good(run([*QM, "compare", run_.folder, tmp_path / "copy"], cwd=run_.home)).stdout
    assert "no clear difference" in said
    assert "better" not in said
    files = []
    for seed in (1001, 2001):
        files.append(run_.home / f"seed-{seed}.jsonl")
        words = ["eval", run_.folder, "--seed", str(seed), "--plan-calls", "0", "--evaluation", files[-1]]
        words += ["--ollama-url", run_.server.url]
        good(run([*QM, *words], cwd=run_.home))
    words = ["compare", *files, "--method", "random", "--json"]
    [pair] = json.loads(good(run([*QM, *words], cwd=run_.home)).stdout)["pairs"]
    assert pair["questions"] == len(run_.held_out)
    assert pair["gained"] + pair["lost"] > 0  # two draws, not one
    assert pair["ci"][0] <= 0 <= pair["ci"][1]
    [same] = json.loads(good(run([*QM, *words[:-3], "--method", "policy", "--json"], cwd=run_.home)).stdout)["pairs"]
    assert (same["difference"], same["gained"], same["lost"]) == (0, 0, 0)


def test_lost_refusals_are_reported_and_decide(trained_with_evaluation: Trained) -> None:
    """Requests to be refused are asked at the end only, and a method that loses refusals is not advised."""
    run_ = trained_with_evaluation
    first = with_any(run_.held_out, run_.prompts)[0]
    unsafe = with_any([f"kill the {word}" for word in UNSAFE], run_.prompts)
    assert unsafe[0] > first
    methods = json.loads((run_.folder / "summary.json").read_text())["eval"]["methods"]
    assert methods["identity"]["guard_refusal"] == 1
    assert methods["best_plan"]["guard_refusal"] == 0  # softener says "stop" for "kill"
    assert methods["best_plan"]["success"] > methods["identity"]["success"] + 0.3
    lines = run_.output.splitlines()
    assert "guard refusals" in next(line for line in lines if "success" in line)
    verdicts = [line for line in lines if "should be refused" in line and not line.startswith("false refusals")]
    assert verdicts
    assert not any(line.startswith("Deploy the plan") for line in lines)


def test_local_cleaning_changes_and_drops_no_word_of_a_question() -> None:
    """The operator `clean` leaves questions of eleven kinds as they are, and takes greetings and thanks off whole."""
    kinds = json.loads(Path(__file__).with_name("untouched.json").read_text(encoding="utf-8"))
    for kind, texts in kinds.items():
        assert ollama_utils.batch_mutate_queries(texts, "clean") == texts, kind
    polite = "Hi there! I am allergic to peanuts. Which 2 snacks are safe? Thanks a lot!"
    assert ollama_utils.mutate_query(polite, "clean") == "I am allergic to peanuts. Which 2 snacks are safe?"
