"""The environment under verifiers' own commands: policies, failing calls, limits, scoring again.

Needs verifiers; tests/integration/test_peers.py runs it in an environment that has it.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from verifiers.v1.cli.eval.main import main as vf_eval
from verifiers.v1.cli.replay import main as vf_replay

from query_mutator.testing import FaultPlan, StubServer, start_server

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "openenv-and-verifiers.md"
SHELF = {"sort": "sorted", "count": "Counter", "join": "path.join", "length": "len"}
Run = Callable[..., list[dict[str, Any]]]


class Librarian:
    """A target that answers when it sees the right word."""

    name = "librarian"

    def reply(self, prompt: str) -> str:
        name = next((name for word, name in SHELF.items() if word in prompt.split()), "")
        return f"It is `{name}`." if name else "I'm not sure what you mean."


class Editor:
    """A policy: it corrects words by itself, asks and submits; about a joint it has nothing to say."""

    name = "editor"

    def reply(self, prompt: str) -> str:
        if "Answer of the target" in prompt:
            return "I would say:\n**SUBMIT**"
        question = prompt.removeprefix("Question: ")
        if "joint" in prompt:
            return "I had rather not."
        return f"REWRITE {question.replace('zort', 'sort').replace('kount', 'count')}\nASK"


MODELS = {"librarian": Librarian(), "editor": Editor()}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    words = [*SHELF, "zort", "kount", "joint"]
    rows = [
        {
            "id": f"q{at}", "query": f"please {word} item {at}", "about": f"{word} {at}",
            "accept": [SHELF.get({"zort": "sort", "kount": "count", "joint": "join"}.get(word, word), "")],
        }
        for at, word in enumerate(words * 4)
    ]  # fmt: skip
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path / "questions.jsonl"


@pytest.fixture
def run(dataset: Path, tmp_path: Path) -> Iterator[Run]:
    """Return a function that runs vf-eval on a server and returns the traces."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def evaluate(server: StubServer, name: str, *flags: str, retries: int = 0) -> list[dict[str, Any]]:
        words = ["query-rewriting", "--no-push", "--no-rich", "-o", str(tmp_path), "--run.name", name]
        words += ["--model", "editor", "--client.base-url", f"{server.url}/v1"]
        words += ["--env.taskset.settings", json.dumps(settings_of(server, max_retries=retries))]
        vf_eval([*words, "--env.taskset.dataset", str(dataset), *flags])
        return traces(tmp_path / name)

    yield evaluate
    for number, handler in handlers.items():
        signal.signal(number, handler)


def settings_of(server: StubServer, **more: Any) -> dict[str, Any]:
    settings = {"ollama_url": server.url, "target_model": "librarian", "encoder": "hash", "wait_for_server_s": 0}
    return {**settings, "reward": "right=1", **more}


def traces(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "traces.jsonl").read_text(encoding="utf-8").splitlines()
    return [trace for line in lines for trace in json.loads(line)["traces"]]


def by_word(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {trace["task"]["data"]["prompt"].split()[1]: trace for trace in found}


@contextmanager
def serving(faults: FaultPlan | None = None) -> Iterator[StubServer]:
    with start_server(MODELS, num_parallel=8, faults=faults) as server:
        yield server


def test_a_language_model_rewrites_asks_and_submits(run: Run) -> None:
    with serving() as server:
        found = by_word(run(server, "policy", "--env.taskset.task.call-price", "0.01"))
        calls = server.stats()["calls_by_model"]
    assert {"zort", "joint", "length"} <= found.keys()
    assert all(trace["ok"] and trace["stop_condition"] == "agent_completed" for trace in found.values())
    zort, joint = found["zort"], found["joint"]
    did = zort["info"]["query_rewriting"]
    assert [one["action"] for one in did["actions"]] == ["rewrite", "ask", "submit"]
    assert did["submitted"]["answer"] == "It is `sorted`."
    assert did["submitted"]["text"].startswith("please sort item")
    counts = ("success", "policy_calls", "target_calls", "unread_replies")
    assert [zort["metrics"][name] for name in counts] == [1, 2, 1, 0]
    assert [joint["metrics"][name] for name in counts] == [0, 8, 1, 8]  # no action in any reply, then it is asked
    assert {name: one["score"] for name, one in zort["rewards"].items()} == {"answer": 1.0, "calls": -0.01}
    assert calls["librarian"] >= len(found)


def test_a_limit_of_turns_submits_what_there_is(run: Run) -> None:
    with serving() as server:
        found = run(server, "short", "--env.agent.max-turns", "1")
    assert {trace["stop_condition"] for trace in found} == {"max_turns"}
    assert all(trace["ok"] and trace["rewards"]["answer"]["score"] >= 0 for trace in found)


class Failing(FaultPlan):
    """Lets a share of the target's calls fail, and none of the policy's."""

    def pick(self, body: bytes, *, attempt: int | None = None) -> str | None:
        return None if b'"editor"' in body else super().pick(body, attempt=attempt)


def test_a_failed_call_is_an_error_and_no_reward(run: Run) -> None:
    faults = Failing(0.3, kinds=("500", "503", "cut", "empty"))
    with serving(faults) as server:
        found = run(server, "failing")
        mended = run(server, "mended", retries=8)
    failed = [trace for trace in found if not trace["ok"]]
    assert 2 <= len(failed) < len(found)
    for trace in found:
        did = trace["info"]["query_rewriting"]
        assert (did["error"] is None) == trace["ok"] == ("answer" in trace["rewards"])
    for trace in failed:
        (error,) = trace["errors"]
        assert error["type"] == "HarnessError"
        assert trace["rewards"] == {}
        assert trace["info"]["query_rewriting"]["error"]["kind"] in ("server", "busy", "malformed", "empty")
    assert all(trace["ok"] for trace in mended)


def test_saved_traces_are_scored_again_without_a_server(run: Run, tmp_path: Path) -> None:
    with serving() as server:
        before = by_word(run(server, "once"))
    for name, flags in (("same", ()), ("other", ("--env.taskset.task.call-price", "0"))):
        vf_replay([str(tmp_path / "once"), "--no-rich", "--output-dir", str(tmp_path / name), *flags])
    same, other = (by_word(traces(tmp_path / name)) for name in ("same", "other"))
    assert {word: trace["rewards"] for word, trace in same.items()} == {
        word: trace["rewards"] for word, trace in before.items()
    }
    assert {name: one["score"] for name, one in other["zort"]["rewards"].items()} == {"answer": 1, "calls": 0}


def test_the_lines_of_the_documentation_run(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = PAGE.read_text(encoding="utf-8").partition("```python needs: verifiers\n")[2].partition("```")[0]
    with serving() as server:
        for written, meant in (
            ('"general"', repr(str(dataset))),
            ('{"gguf": "smollm2"}', repr(settings_of(server))),
            ('"MODEL"', '"editor"'),
            ("http://127.0.0.1:8000", server.url),
        ):
            assert written in code
            code = code.replace(written, meant)
        exec(code, {})
    rewards = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(rewards) == 5
    assert all(-1 < reward <= 1 for reward in rewards)
