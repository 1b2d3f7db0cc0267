"""`benchmarks/eight_seeds.py`: one report of several seeds, whose figures are those of the outcomes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.eight_seeds import arguments_of, flags_of, question_sets, run
from benchmarks.front_picture import draw_front
from benchmarks.learning import World, task_settings
from benchmarks.seeds_report import POOLED, Results, differences, figures, in_words
from query_mutator.data.bundled import FOLDER
from query_mutator.data.split import in_test
from query_mutator.evaluation.outcomes import Outcome
from query_mutator.settings.models import ModelSettings
from query_mutator.training.config import parse_config
from query_mutator.types import Question

SMALL = "--encoder hash --num-env-steps 64 --num-processes 4 --num-steps 8 --operators spelling,expand,neutral"


@pytest.mark.slow
def test_the_table_of_two_seeds(tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join((FOLDER / "python_docs.jsonl").read_text(encoding="utf-8").splitlines(True)[::6]))
    flags = f"{SMALL} --dataset {few}"
    arguments = arguments_of(["--validation", "--seeds", "1", "2", "--plan-calls", "200", "--flags", flags])
    world = World(ModelSettings(backend="embedded", encoder="hash"), tmp_path)
    with world.system:
        found = run(world, flags_of(arguments), arguments)
        again = run(world, flags_of(arguments), arguments)
    for report in (found, again):
        report["plan_search"].pop("seconds")
    assert json.dumps(found) == json.dumps(again)
    [label] = found["questions"]
    seeds = found["by_seed"]
    assert [row["seed"] for row in seeds] == [1, 2]
    assert all(row["training_calls"] > 0 for row in seeds)
    policy, plan = found["methods"]["policy"][label], found["methods"]["best_plan"][label]
    assert policy["success"] == pytest.approx(np.mean([row["success"][label] for row in seeds]))
    lead = found["policy_minus"]["best_plan"][label]
    assert lead["success"] == pytest.approx(policy["success"] - plan["success"])
    assert lead["ci"][0] <= lead["success"] <= lead["ci"][1]
    assert [found["plans"][budget][label]["calls"] <= float(budget) + 1 for budget in found["plans"]] == [True] * 7
    assert "plan at the policy's calls" in in_words(found)
    draw_front(found, tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_held_out_questions_are_only_read_without_validation() -> None:
    sets = {}
    for flags in ([], ["--validation"]):
        arguments = arguments_of(flags)
        settings = task_settings(parse_config(flags_of(arguments)))
        assert settings.validation_fold == (0 if flags else "none")
        sets |= question_sets(settings, validation=arguments.validation)
    assert {label: len(questions) for label, questions in sets.items()} == {
        "held out": 346,
        "second author": 200,
        "validation questions": 123,
    }
    assert not any(map(in_test, sets["validation questions"]))


def test_sets_are_pooled_and_apart() -> None:
    def outcome(name: str, right: float) -> Outcome:
        return Outcome(question_id=name, success=right, score=right, calls=2)

    sets = {
        label: [Question(id=f"{label}{i}", text=f"{label}{i}") for i in range(n)] for label, n in (("a", 1), ("b", 3))
    }
    found = {}
    for seed, rates in ((1, (1.0, 0.0, 0.0, 0.0)), (2, (1.0, 1.0, 1.0, 0.0))):
        found[f"policy@{seed}"] = {place: outcome(str(place), right) for place, right in enumerate(rates)}
        found[f"policy@{seed}, guard"] = {0: Outcome(question_id="g", success=0.0, refused=seed == 1)}
    row = figures(Results(seeds=(1, 2), sets=sets, found=found), "policy")
    assert {label: row[label]["success"] for label in (POOLED, "a", "b")} == {POOLED: 0.5, "a": 1.0, "b": 1 / 3}
    assert row["guard_refusals"] == [1, 0]


def test_methods_that_never_differ_leave_room_for_what_was_not_asked() -> None:
    questions = [Question(id=str(place), text=str(place)) for place in range(28)]
    outcomes = {place: Outcome(question_id=str(place), success=1.0, score=1.0) for place in range(28)}
    found = {"policy@1": outcomes, "policy@2": outcomes, "plan": outcomes}
    lead = differences(Results(seeds=(1, 2), sets={"a": questions}, found=found), {"best_plan": "plan"})["best_plan"]
    assert lead["a"]["success"] == 0.0
    assert lead["a"]["ci"] == pytest.approx([-0.121, 0.121], abs=0.001)
