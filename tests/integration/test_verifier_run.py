"""A run on `--dataset reasoning-gym:NAME`: scored by the task, also after a resume, from policy.qm and by a plan."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from query_mutator.data import reasoning_gym
from query_mutator.embedded.server import start_server
from tests.conftest import Librarian, Softener
from tests.integration.conftest import flags_of
from tests.integration.training_runs import rows, the_run, train
from tests.qm_command import qm

#: Longer than a file name may be, with a slash.
SPEC = "reasoning-gym:chain_sum(size=30, max_digits=2),gcd(size=20)" + "".join(
    f",basic_arithmetic(size=1, seed={seed}, operators=['+', '/'])" for seed in range(5)
)


class Adder(Librarian):
    """A target that calculates sums, in a sentence, and gives a list of guesses to anything else."""

    def reply(self, prompt: str) -> str:
        found = re.search(r"\d[\d +-]*(?==)", prompt)
        return f"The result is {eval(found[0])}." if found else "It is 1, 2 or 3."


@pytest.fixture
def flags(tmp_path: Path) -> Iterator[list[str]]:
    pytest.importorskip("reasoning_gym")
    with start_server([Adder(), Softener()], num_parallel=8) as server:
        yield [*flags_of(server, Path("unused"), tmp_path / "runs"), "--dataset", SPEC]


def forget_entries() -> None:
    """Forget what was generated, as another process has."""
    reasoning_gym._entry.cache_clear()
    reasoning_gym._dataset.cache_clear()


def test_a_run_is_scored_by_its_tasks_and_so_is_what_is_made_of_it(flags: list[str], tmp_path: Path) -> None:
    assert train(*flags, "--no-evaluate", "--no-use-linear-lr-decay") == 0
    run = the_run(tmp_path)
    forget_entries()
    assert train("--resume", str(run), "--num-env-steps", "96") == 0
    steps = rows(run, "transcripts")
    assert {row["step"] for row in steps} == set(range(24))
    assert all(list(row["parts"]) == ["verifier"] for row in steps if row["valid"])
    by_task = {
        name: {row["parts"]["verifier"] for row in steps if row["question_id"].startswith(name)}
        for name in ("chain_sum(max_digits=2,seed=0,size=30)#", "gcd(seed=0,size=20)#")
    }
    assert list(by_task.values()) == [{1.0}, {0.0}]
    given = tmp_path / "given.qm"
    assert qm("export-policy", run, "-o", given) == 0
    for policy in (run, run / "policy.qm", given):
        forget_entries()
        assert qm("eval", "--checkpoint", policy, "--json", tmp_path / f"{policy.name}.json") == 0
        report = json.loads((tmp_path / f"{policy.name}.json").read_text())
        assert [report["by_tag"][tag]["methods"]["identity"]["success"] for tag in ("chain_sum", "gcd")] == [1.0, 0.0]


def test_a_plan_is_found_within_few_calls(flags: list[str], tmp_path: Path) -> None:
    words = dict(zip(flags[::2], flags[1::2], strict=True))
    kept = ("--ollama-url", "--target-model", "--mutator-model", "--encoder", "--operators", "--dataset", "--save-dir")
    found = [word for name in kept for word in (name, words[name])]
    assert qm("plan", *found, "--max-calls", "60") == 0
    summary = json.loads(next((tmp_path / "runs").glob("*/summary.json")).read_text())
    assert summary["plan"]["success"] > 0
