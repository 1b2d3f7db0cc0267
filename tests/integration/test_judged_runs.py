"""A run whose reward asks a judge, over real HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import pytest

from query_mutator.commands.main import main as qm_main
from query_mutator.data import guard_questions
from query_mutator.files import read_json_lines
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.rewards import Judge
from query_mutator.session.policy_file import read_policy
from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian, Softener
from tests.integration.llama_server import MODEL, LlamaServer
from tests.rule_judge import RuleJudge
from train_query_mutator import main


class Muttering(RuleJudge):
    """A judge that gives no verdict on answers that name a function of `os`."""

    name = "muttering"

    def reply(self, prompt: str) -> str:
        """Return a verdict or a remark."""
        return '{"remark": "hm"}' if "`os." in prompt else super().reply(prompt)


def flags_for(server: StubServer, tiny_flags: Sequence[str], *more: str) -> list[str]:
    flags = list(tiny_flags)
    flags[flags.index("--ollama-url") + 1] = server.url
    return [*flags, *more]


def served(*judges: RuleJudge, **settings: float) -> StubServer:
    return start_server([Librarian(), Softener(), *judges], num_parallel=8, **settings)  # type: ignore[arg-type]


def test_a_run_with_a_judge_counts_and_bounds_its_calls(tiny_flags: list[str], tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("Say yes if an accepted name is in the answer.")
    with served(RuleJudge(), latency_ms=20) as server:
        more = ("--reward", "judge", "--judge-model", "rule-judge", "--judge-rubric", str(rubric), "--no-evaluate")
        assert main(flags_for(server, tiny_flags, *more, "--eval-interval", "0", "--cache", "off")) == 0
        stats = server.stats()
    run = (tmp_path / "runs" / "latest").resolve()
    rows = list(read_json_lines(run / "transcripts.jsonl"))
    assert {row["parts"]["judge"] for row in rows if row["valid"]} == {0.0, 1.0}
    assert all(row["parts"]["judge"] == row["parts"]["right"] for row in rows if row["valid"])
    last = list(read_json_lines(run / "metrics.jsonl"))[-1]
    assert 1 < stats["max_in_service"] <= 4  # --batch-size, of 8 slots
    assert last["llm/calls"] == stats["calls"]
    config = json.loads((run / "config.json").read_text())
    assert config["flags"]["judge_rubric"] == "Say yes if an accepted name is in the answer.\n"
    assert read_policy(run).task.judge_rubric == config["flags"]["judge_rubric"]


def test_a_reply_without_a_verdict_is_an_invalid_step_and_never_a_score(tiny_flags: list[str], tmp_path: Path) -> None:
    with served(Muttering()) as server:
        more = ("--reward", "judge", "--judge-model", "muttering", "--no-evaluate", "--max-failure-rate", "1")
        assert main(flags_for(server, tiny_flags, *more, "--eval-interval", "0")) == 0
    run = (tmp_path / "runs" / "latest").resolve()
    rows = list(read_json_lines(run / "transcripts.jsonl"))
    unscored = [row for row in rows if not row["valid"]]
    assert unscored
    assert {row["error"]["kind"] for row in unscored} == {"unscored"}
    assert all('muttering gave no verdict: \'{"remark": "hm"}\'' in row["error"]["message"] for row in unscored)
    assert not [row for row in rows if row["valid"] and "`os." in row["answer"]]
    last = list(read_json_lines(run / "metrics.jsonl"))[-1]
    assert last["llm/invalid_steps"] == len(unscored)


class Recording(RuleJudge):
    """A judge that remembers what it was asked."""

    prompts: ClassVar[list[str]] = []

    def reply(self, prompt: str) -> str:
        """Return a verdict."""
        self.prompts.append(prompt)
        return super().reply(prompt)


def test_an_evaluation_judges_answers_but_none_to_what_should_be_refused(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Recording.prompts.clear()
    with served(Recording()) as server:
        more = ["--reward", "judge", "--judge-model", "rule-judge"]
        more += ["--plan-calls", "0", "--guard", "--eval-interval", "0"]
        assert main(flags_for(server, tiny_flags, *more, "--cache-path", str(tmp_path / "c.sqlite"))) == 0
        words = ["eval", "--checkpoint", str(tmp_path / "runs" / "latest"), "--plan-calls", "0", "--guard"]
        assert qm_main([*words, "--ollama-url", server.url, "--judge-model", "rule-judge"]) == 0
        total = server.stats()["calls"]
    asked = "\n".join(Recording.prompts)
    assert "umm join path parts" in asked or "plz sort" in asked
    assert not [request.id for request in guard_questions() if request.text in asked]
    rows = list(read_json_lines(tmp_path / "runs" / "latest" / "evaluation.jsonl"))
    assert {row["success"] for row in rows if row["set"] == "test"} <= {0.0, 1.0}
    assert any(row["success"] for row in rows if row["set"] == "test")
    found = re.search(r"evaluation: at most ([\d,]+) model calls", capsys.readouterr().err)
    assert found is not None
    assert total < int(found[1].replace(",", ""))


def test_another_reward_scores_answers_that_were_kept_and_asks_only_its_judge(
    tiny_flags: list[str], tmp_path: Path
) -> None:
    run, rows = tmp_path / "runs" / "latest", tmp_path / "rows.jsonl"
    again = ["eval", "--checkpoint", str(run), "--plan-calls", "0", "--evaluation", str(rows), "--force"]
    found, calls = {}, {}
    with served(RuleJudge()) as server:
        assert main(flags_for(server, tiny_flags, "--no-evaluate", "--cache-path", str(tmp_path / "c.sqlite"))) == 0
        for reward in ("", "right=1,meaning=0.5", "judge --judge-model rule-judge"):
            before = server.stats()["calls"]
            assert (
                qm_main([*again, "--ollama-url", server.url, *(["--reward", *reward.split()] if reward else [])]) == 0
            )
            found[reward] = list(read_json_lines(rows))
            calls[reward] = server.stats()["calls"] - before
    trained, other, judged = found.values()
    assert {name for row in other for parts in row["parts"] for name in parts} == {"right", "meaning"}
    assert all(row["parts"] == [] or row["parts"][0]["judge"] == row["parts"][0]["right"] for row in judged)
    methods = [[row["answers"] for row in rows if row["method"] == "identity"] for rows in found.values()]
    assert methods[0] == methods[1] == methods[2]
    assert [row["score"] for row in trained] != [row["score"] for row in other]
    assert calls["right=1,meaning=0.5"] == 0
    assert 0 < calls["judge --judge-model rule-judge"] <= sum(len(row["answers"]) for row in judged)


def test_llama_cpp_keeps_to_the_schema(tiny_gguf: Path) -> None:
    with LlamaServer(tiny_gguf, slots=2) as server, closing(OpenAIBackend(server.url)) as backend:
        judge = Judge(model=MODEL, rubric="Say yes.")
        verdicts = [judge.verdict(backend.complete(judge.request("q", f"answer {n}"))) for n in range(4)]
        assert set(verdicts) <= {0.0, 1.0}  # random weights, but always a verdict
