"""environments/query_rewriting under verifiers' own commands: policies, failing calls, resuming, scoring again."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers.v1", reason="verifiers is in an environment of its own: make install-peers")

from verifiers.v1.cli.eval.main import main as vf_eval
from verifiers.v1.cli.replay import main as vf_replay

from query_mutator.embedded.faults import FaultPlan
from query_mutator.embedded.server import EmbeddedServer, start_server
from query_rewriting.table import main as table
from tests.conftest import Librarian, Softener
from tests.integration.conftest import ROWS, write_dataset
from tests.qm_command import qm

Run = Callable[..., list[dict[str, Any]]]


class Editor(Softener):
    """A policy: rewrites by itself, asks, and submits an answer; what it cannot help it gives to an operator."""

    name = "editor"

    def reply(self, prompt: str) -> str:
        if "Answer of the target" in prompt:
            return (
                "OPERATOR filler\nASK" if "not sure" in prompt and "left: 6" in prompt else "I would say:\n**SUBMIT**"
            )
        if "Question now" in prompt:
            return "Let me think."
        question = prompt.removeprefix("Question: ")
        if question == "kill it":
            return "I had rather not."
        return f"REWRITE {super().reply(question).replace('words', 'a word')}\nASK"


class Failing(FaultPlan):
    """Lets a share of the target's calls fail, and none of the policy's."""

    def pick(self, body: bytes, *, attempt: int | None = None) -> str | None:
        return None if b'"editor"' in body else super().pick(body, attempt=attempt)


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with start_server([Librarian(), Softener(), Editor()], num_parallel=8) as server:
        yield server


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "questions.jsonl", ROWS)


@pytest.fixture
def run(dataset: Path, tmp_path: Path) -> Iterator[Run]:
    """Return a function that runs vf-eval on a server and returns the traces."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def evaluate(server: EmbeddedServer, name: str, *flags: str) -> list[dict[str, Any]]:
        models = (
            "backend",
            "ollama",
            "ollama-url",
            server.url,
            "target-model",
            "librarian",
            "mutator-model",
            "softener",
        )
        models += ("encoder", "hash", "cache", "off", "wait-for-server-s", "0", "timeout-s", "60")
        target = [f"--env.taskset.models.{word}" if place % 2 == 0 else word for place, word in enumerate(models)]
        words = [
            "query-rewriting",
            "--no-push",
            "--no-rich",
            "-o",
            str(tmp_path),
            "--run.name",
            name,
            "--model",
            "editor",
        ]
        words += ["--client.base-url", f"{server.url}/v1", "--env.taskset.dataset", str(dataset)]
        vf_eval([*words, "--env.taskset.operators", "spelling,filler", *target, *flags])
        return traces(tmp_path / name)

    yield evaluate
    for number, handler in handlers.items():
        signal.signal(number, handler)


def traces(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "traces.jsonl").read_text(encoding="utf-8").splitlines()
    return [trace for line in lines for trace in json.loads(line)["traces"]]


def by_question(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {trace["task"]["data"]["prompt"]: trace for trace in found}


REPLAY = ("--env.agent.harness.id", "query-rewriting-replay")
DOCS = ("--env.taskset.dataset", "python_docs", "-n", "24", "--env.taskset.models.max-retries")


def test_a_language_model_rewrites_asks_and_submits(run: Run, server: EmbeddedServer) -> None:
    found = by_question(run(server, "policy", "--env.taskset.task.call-price", "0.01"))
    assert len(found) == 7
    assert all(trace["ok"] and trace["stop_condition"] == "agent_completed" for trace in found.values())
    sort, mute, words = (found[text] for text in ("plz sort", "kill it", "join my words"))
    info = sort["info"]["query_rewriting"]
    assert [step["operator"] for step in info["steps"]] == ["rewrite", "ask", "submit"]
    assert info["submitted"] == {"text": "sort", "form": "as_is", "answer": "`sorted` is what you want."}
    # The policy's calls are in the trace, those of the target and the rewriter in metrics of their own.
    counts = ("policy_calls", "target_requests", "rewriter_requests", "failed_requests", "unread_replies")
    assert [sort["metrics"][name] for name in counts] == [2, 1, 0, 0, 0]
    assert [words["metrics"][name] for name in counts] == [2, 1, 0, 0, 0]
    assert [mute["metrics"][name] for name in counts] == [8, 1, 0, 0, 8]  # no action in any reply, then it is asked
    assert sort["rewards"]["calls"]["score"] == -0.01
    assert (sort["metrics"]["right"], words["metrics"]["right"]) == (0, 0)
    right = found["plz sort my list"]
    assert right["metrics"]["right"] == 1
    assert 0.7 < right["rewards"]["answer"]["score"] <= 1
    stats = server.stats()["calls_by_model"]
    assert (stats["librarian"], stats["editor"]) == (7, sum(len(trace["calls"]) for trace in found.values()))


def test_a_limit_of_turns_submits_what_there_is(run: Run, server: EmbeddedServer) -> None:
    found = run(server, "short", "--env.agent.max-turns", "1")
    assert {trace["stop_condition"] for trace in found} == {"max_turns"}
    assert all(trace["ok"] and trace["rewards"]["answer"]["score"] >= 0 for trace in found)


def test_a_failed_call_is_an_error_and_no_reward(run: Run) -> None:
    kinds = ("500", "503", "cut", "empty")
    with start_server([Librarian(), Softener(), Editor()], num_parallel=8, faults=Failing(0.2, kinds=kinds)) as server:
        found = run(server, "failing", *DOCS, "0")
        struck = sum(server.stats()["faults"].values())
        mended = run(server, "mended", *DOCS, "4", *REPLAY)
    failed = [trace for trace in found if not trace["ok"]]
    assert 2 <= len(failed) < 12
    for trace in failed:
        info, (error,) = trace["info"]["query_rewriting"], trace["errors"]
        assert trace["rewards"] == {}
        assert (error["type"], trace["stop_condition"]) == ("HarnessError", "harness_error")
        assert f"CallFailed: {info['error']['message']}" in error["message"]
        assert info["error"]["kind"] in ("server", "busy", "malformed", "empty")
        assert info["failed"][-1]["purpose"] in ("target", "mutate")
        assert info["submitted"] is None
    for trace in found:
        assert trace["metrics"]["failed_requests"] == len(trace["info"]["query_rewriting"]["failed"])
        assert trace["ok"] == (trace["metrics"]["failed_requests"] == 0)
        assert trace["ok"] == ("answer" in trace["rewards"])
    assert sum(trace["metrics"]["failed_requests"] for trace in found) == struck
    # Retries mend every one of them, and each failed attempt stays visible.
    assert all(trace["ok"] and trace["rewards"]["answer"] for trace in mended)
    assert sum(trace["metrics"]["failed_requests"] for trace in mended) >= 2


def test_a_cap_on_requests_ends_a_run_in_errors(run: Run, server: EmbeddedServer) -> None:
    found = run(server, "capped", "--env.taskset.max-requests", "3", "-c", "1")
    assert [trace["ok"] for trace in found].count(True) == 3
    assert {trace["info"]["query_rewriting"]["error"]["kind"] for trace in found if not trace["ok"]} == {"not_asked"}
    assert server.stats()["calls_by_model"]["librarian"] == 3


def test_policies_and_language_models_stand_in_one_table(
    run: Run, server: EmbeddedServer, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = (
        "--ollama-url",
        server.url,
        "--target-model",
        "librarian",
        "--mutator-model",
        "softener",
        "--encoder",
        "hash",
    )
    search = ("--operators", "spelling,filler", "--max-calls", "60", "--save-dir", tmp_path / "runs")
    assert qm("plan", *models, "--dataset", dataset, *search) == 0
    plan, name = next((tmp_path / "runs").glob("*/policy.qm")), "--env.agent.harness.policy"
    original = run(server, "original", *REPLAY)
    folder = by_question(run(server, "folder", *REPLAY, name, str(plan.parent)))
    file = by_question(run(server, "file", *REPLAY, name, str(plan)))
    run(server, "model")
    assert {trace["metrics"]["policy_calls"] for trace in [*original, *folder.values()]} == {0}
    assert {trace["metrics"]["target_requests"] for trace in original} == {1}
    assert {text: trace["rewards"] for text, trace in file.items()} == {
        text: trace["rewards"] for text, trace in folder.items()
    }
    capsys.readouterr()
    assert table([str(tmp_path / run) for run in ("original", "file", "model")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[4:7]] == ["original", "file", "model"]
    assert "language model" in lines[6]
    assert table([str(tmp_path / "runs")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_saved_traces_are_scored_again_without_a_server(run: Run, tmp_path: Path) -> None:
    with start_server([Librarian(), Softener(), Editor()]) as server:
        before = by_question(run(server, "once"))
    vf_replay([str(tmp_path / "once"), "--no-rich", "--output-dir", str(tmp_path / "same")])
    same = by_question(traces(tmp_path / "same"))
    assert {text: trace["rewards"] for text, trace in same.items()} == {
        text: trace["rewards"] for text, trace in before.items()
    }
    assert same["plz sort"]["metrics"] == before["plz sort"]["metrics"]
    other = [str(tmp_path / "once"), "--no-rich", "--output-dir", str(tmp_path / "other")]
    vf_replay([*other, "--env.taskset.task.reward", "answered", "--env.taskset.task.call-price", "0"])
    rewards = by_question(traces(tmp_path / "other"))["plz sort"]["rewards"]
    assert {name: reward["score"] for name, reward in rewards.items()} == {"answer": 1, "calls": 0}


def test_a_resumed_run_asks_only_for_what_failed(run: Run, tmp_path: Path) -> None:
    with start_server([Librarian(), Softener(), Editor()], faults=Failing(0.2, kinds=("500",))) as failing:
        done = {trace["id"] for trace in run(failing, "resumed", *DOCS, "0", *REPLAY) if trace["ok"]}
    assert 12 < len(done) < 24
    # The same address, the same models, no faults any more.
    with start_server([Librarian(), Softener(), Editor()], port=failing.port) as server:
        vf_eval(["@", str(tmp_path / "resumed" / "configs" / "resolved" / "eval.json"), "--resume"])
        again = traces(tmp_path / "resumed")
        assert (len(again), sum(trace["ok"] for trace in again)) == (24, 24)
        assert done < {trace["id"] for trace in again}
    with pytest.raises(SystemExit, match="requires the exact config"):
        run(server, "resumed", *DOCS, "1", *REPLAY, "--resume")


def test_the_lines_of_the_documentation_run(
    server: EmbeddedServer, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "use-verifiers.md").read_text(encoding="utf-8")
    code = page.partition("```python needs: verifiers\n")[2].partition("```")[0]
    models = {"backend": "ollama", "ollama_url": [server.url], "target_model": "librarian", "encoder": "hash"}
    for written, meant in (
        ('"general"', repr(str(dataset))),
        ('{"gguf": "smollm2"}', repr(models)),
        ('"MODEL"', '"editor"'),
        ("http://127.0.0.1:8000", server.url),
    ):
        assert written in code
        code = code.replace(written, meant)
    exec(code, {})
    rewards = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(rewards) == 5
    assert all(-1 < reward <= 1 for reward in rewards)
