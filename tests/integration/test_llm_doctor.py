"""`qm doctor` against real servers: what it prints, and its exit code."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from query_mutator.commands.main import main
from query_mutator.embedded.server import start_server
from query_mutator.errors import ServerDownError, UsageError
from tests.conftest import Upper
from tests.integration.embedded_http import TwoNumbers

DEFAULT_ADVICE = "server answers about 1 call at a time: OLLAMA_NUM_PARALLEL=8 ollama serve"


def lines_of(capsys: pytest.CaptureFixture[str], argv: Sequence[str], *, code: int = 0) -> dict[str, list[str]]:
    assert main(["doctor", *argv]) == code
    lines: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        name, _, finding = line.partition(":")
        lines.setdefault(name, []).append(finding.strip())
    return lines


def test_a_server_as_it_comes_is_told_to_take_more_slots(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server({}, latency_ms=60) as server:
        lines = lines_of(capsys, ["--ollama-url", server.url, "--target-model", "echo"])
    assert lines["server"] == [f"Ollama 0.1.0+embedded at {server.url}"]
    assert lines["model"][0].startswith("echo:latest: installed, ")
    assert lines["model"][0].endswith("completion")
    assert "loaded with num_ctx=4096" in lines["options"][0]
    assert lines["slots"][0].startswith("about 1;")
    assert lines["advice"][0].startswith(DEFAULT_ADVICE)
    assert "batching cannot help" in lines["advice"][0]


def test_a_server_with_enough_slots_gets_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server({}, num_parallel=8, latency_ms=60) as server:
        lines = lines_of(capsys, ["--ollama-url", server.url, "--target-model", "echo", "--num-ctx", "2048"])
    assert lines["slots"][0].startswith("about 8 or more;")
    assert lines["advice"] == ["ready for --batch-size 8"]
    assert lines["options"][0].startswith("num_ctx=2048 (loaded with num_ctx=2048)")


def test_a_missing_model_is_named_with_the_command_that_fetches_it(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server({}) as server:
        argv = ["--ollama-url", server.url, "--target-model", "llama3.2:1b", "--mutator-model", "echo", "--no-probe"]
        lines = lines_of(capsys, argv, code=2)
    assert lines["model"][0] == (
        f"{server.url} has no model 'llama3.2:1b': run `ollama pull llama3.2:1b` (installed: echo:latest)"
    )
    assert lines["model"][1].startswith("echo:latest: installed")


def test_several_servers_are_looked_at_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server({}) as one, start_server({}) as other:
        lines = lines_of(capsys, ["--ollama-url", one.url, other.url, "--no-probe"])
    assert [finding.split()[-1] for finding in lines["server"]] == [one.url, other.url]


def test_an_openai_compatible_server_is_looked_at_too(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server({}, num_parallel=2, latency_ms=100) as server:
        lines = lines_of(capsys, ["--openai-url", server.url, "--target-model", "echo"])
    assert lines["server"] == [f"an OpenAI-compatible server at {server.url}/v1"]
    assert lines["advice"][0].startswith("server answers about 2 calls at a time: start it with 8 slots")


def test_a_probe_that_fails_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server({}, latency_ms=2000) as server:
        lines = lines_of(capsys, ["--ollama-url", server.url, "--target-model", "echo", "--probe-s", "0.3"], code=2)
    assert lines["slots"][0].startswith("unknown, the probe failed (timeout:")


def test_no_server_and_contradictions_are_errors_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with start_server({}) as gone:
        url = gone.url
    with pytest.raises(ServerDownError, match="ollama serve"):
        main(["doctor", "--ollama-url", url])
    with pytest.raises(UsageError, match="leave one of them out"):
        main(["doctor", "--ollama-url", url, "--openai-url", url])
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(UsageError, match="--openai-url"):
        main(["doctor", "--backend", "openai"])
    with pytest.raises(UsageError, match="batch_size=1 must be at least 2; the default is 8"):
        main(["doctor", "--batch-size", "1"])


def test_a_hosted_model_that_is_not_offered_says_what_is(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server({}) as server:
        lines = lines_of(capsys, ["--openai-url", server.url, "--target-model", "gpt", "--no-probe"], code=2)
    assert "it offers echo:latest" in lines["model"][0]


def test_the_default_models_are_those_that_a_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server([Upper()], encoder=TwoNumbers()) as server:
        own = lines_of(capsys, ["--ollama-url", server.url, "--no-probe"])
    assert [finding.split(":")[0] for finding in own["model"]] == ["upper"]
    with start_server({"pydoc-assistant": Upper()}) as server:  # the mutator of a run is missing
        assistant = lines_of(capsys, ["--ollama-url", server.url, "--no-probe"], code=2)
    assert "no model 'rule-rewriter'" in assistant["model"][1]


def test_an_embedder_is_neither_suggested_nor_accepted_as_a_model_that_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with start_server([], encoder=TwoNumbers()) as server:
        missing = lines_of(capsys, ["--ollama-url", server.url, "--target-model", "all-mini", "--no-probe"], code=2)
        embedder = lines_of(capsys, ["--ollama-url", server.url, "--target-model", "all-minilm"], code=2)
    assert missing["model"][0].endswith("run `ollama pull all-mini` (installed: echo:latest)")
    assert "all-minilm:latest makes embeddings and no text" in embedder["model"][0]
    assert "slots" not in embedder


def test_a_mutator_without_a_rule_for_an_operator_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    rewriter = Upper()
    rewriter.operators = ("spelling", "slang")  # type: ignore[attr-defined]
    with start_server([rewriter]) as server:
        lines = lines_of(capsys, ["--ollama-url", server.url, "--no-probe"], code=2)
    assert "upper:latest rewrites by rules and has none for terms" in lines["model"][1]
