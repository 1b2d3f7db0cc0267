"""Several models as arms: a small one first, a large one where that is predicted to gain; over HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from query_mutator import Rewriter
from query_mutator.testing import StubServer, start_server
from query_mutator.types import ChatRequest, Completion
from tests.integration.training_runs import the_run, train
from tests.qm_command import qm

CALLS = {"small": 0, "large": 0}


def total(request: ChatRequest) -> int:
    """Return the sum that a question asks for."""
    words = request.messages[-1].content.replace("?", "").split()
    return sum(int(word) for word in words if word.isdigit())


def small(request: ChatRequest) -> str:
    """Add even sums; guess odd ones, in other words."""
    CALLS["small"] += 1
    found = total(request)
    return f"The answer is {found}." if found % 2 == 0 else f"I am not sure, maybe it is about {found + 1} or so"


def large(request: ChatRequest) -> str:
    """Add all sums."""
    CALLS["large"] += 1
    return f"The answer is {total(request)}."


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[StubServer, StubServer]]:
    with start_server({"small": small}) as one, start_server({"large": large}) as other:
        yield one, other


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    rows = [
        {"id": f"{a}", "question": f"What is {a} plus {a // 2}?", "accept": [str(a + a // 2)], "about": f"sum {a}"}
        for a in range(10, 210)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def flags_of(servers: tuple[StubServer, StubServer], dataset: Path) -> list[Any]:
    one, other = servers
    named = ["--target-model", f"small@{one.url}", "--target-model", f"large@{other.url}/v1"]
    return [*named, "--encoder", "hash", "--dataset", dataset, "--cache", "off"]


def test_a_plan_asks_the_large_model_where_it_gains(
    servers: tuple[StubServer, StubServer], dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = flags_of(servers, dataset)
    command = ["--price", "small=1,large=8", "--budget", 5.5, "--max-calls", 240, "--save-dir", tmp_path / "runs"]
    assert qm("plan", *named, *command, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["plan"]["questions"], found["plan"]["steps"]) == (120, ["small", "ask", "large"])
    assert found["plan"]["success"] > 0.95
    assert 4 < found["plan"]["calls"] < 5.5
    assert found["plan"]["shares"]["large"] == pytest.approx(1 / 3, abs=0.05)
    run = the_run(tmp_path)
    assert qm("eval", run, *named, "--plan-calls", 0, "--json", "-") == 0
    table = json.loads(capsys.readouterr().out)
    assert "a price of" in table["verdict"]["sentence"]
    found = table["methods"]
    assert (found["small alone"]["price_per_question"], found["large alone"]["price_per_question"]) == (1, 8)
    assert "logprob_cascade" not in found  # these models report none
    paid, shares = found["policy"]["price_per_question"], found["policy"]["model_shares"]
    assert found["policy"]["success"] > 0.95
    assert 0.55 < shares["small"] < 0.8
    assert found["random_cascade"]["price_per_question"] == pytest.approx(paid)
    assert found["random_cascade"]["model_shares"] == shares
    assert found["question_classifier"]["price_per_question"] <= paid
    assert max(found[name]["success"] for name in ("random_cascade", "question_classifier", "small alone")) < 0.9
    given = {"target_model": tuple(named[1:4:2])}
    with Rewriter.load(run, encoder="hash", **given) as rewriter:
        before = dict(CALLS)
        easy, hard = rewriter.rewrite("What is 300 plus 4?"), rewriter.rewrite("What is 300 plus 5?")
    assert (easy.answer, easy.form) == ("The answer is 304.", "small")
    assert (hard.answer, hard.form) == ("The answer is 305.", "large")
    assert (CALLS["small"] - before["small"], CALLS["large"] - before["large"]) == (2, 1)


def test_a_policy_is_trained_on_arms_of_several_models(
    servers: tuple[StubServer, StubServer], dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flags.toml").write_text('price = "small=2,large=16"')
    sizes = ["--num-env-steps", "256", "--num-processes", "8"]
    sizes += ["--answer-calls", "150", "--plan-calls", "1200", "--eval-calls", "4000"]
    command = ["--algo", "direct", *sizes, "--eval-interval", 0, "--budget", 10, "--save-dir", tmp_path / "runs"]
    assert train(*map(str, [*flags_of(servers, dataset), *command, "--config", tmp_path / "flags.toml"])) == 0
    assert "share of calls" in capsys.readouterr().out
    run = the_run(tmp_path)
    steps = [json.loads(line) for line in (run / "transcripts.jsonl").read_text().splitlines()]
    assert {"small", "large"} < {step["operator"] for step in steps}
    assert "ask" not in {step["operator"] for step in steps}  # the arm `small` asks the same
    methods = json.loads((run / "summary.json").read_text())["eval"]["methods"]
    assert methods["small alone"]["success"] < methods["policy"]["success"] <= 1
    assert methods["best_plan"]["model_shares"]["large"] > 0.1  # by its gains
    assert methods["best_plan"]["price_per_question"] <= 11
    assert 2 <= methods["policy"]["price_per_question"] < methods["large alone"]["price_per_question"] == 16
    more = ["--resume", run, "--num-env-steps", 512, "--no-evaluate"]
    assert train(*map(str, [*flags_of(servers, dataset), *more])) == 0


def test_further_replies_at_a_temperature_are_arms(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lucky(request: ChatRequest) -> Completion:
        """Add even sums; at a temperature those whose parity is that of the seed."""
        found = total(request)
        if found % 2 == (request.seed or 0) % 2 * bool(request.temperature):
            return Completion(text=f"The answer is {found}.", logprob=-0.1)
        return Completion(text=f"I am not sure, maybe it is about {found + 1} or so", logprob=-2.0)

    (tmp_path / "qm.toml").write_text('[plan]\nsamples = 3\nsample_temperature = 0.8\nforms = "none"')
    with start_server({"lucky": lucky}) as server:
        flags = ["--target-model", f"lucky@{server.url}/v1", "--encoder", "hash", "--dataset", dataset]
        command = ["--cache", "off", "--operators", "none", "--answer", "learned", "--budget", 1.7, "--max-calls", 2000]
        with contextlib.chdir(tmp_path):
            assert qm("plan", *flags, *command, "--save-dir", tmp_path / "runs", "--json", "-") == 0
        found = json.loads(capsys.readouterr().out)
        assert "as_is#3" in found["plan"]["steps"]
        assert found["plan"]["success"] > 0.95
        stats = server.stats()
        [requests] = [count for route, count in stats["routes"].items() if "completions" in route]
        assert requests < sum(stats["calls_by_model"].values()) <= found["calls"]  # two samples in one request
        with Rewriter.load(the_run(tmp_path), encoder="hash", target_model=(f"lucky@{server.url}/v1",)) as rewriter:
            answers = [one.answer for one in rewriter.rewrite_many(["What is 90 plus 30?", "What is 91 plus 30?"])]
    assert answers == ["The answer is 120.", "The answer is 121."]
