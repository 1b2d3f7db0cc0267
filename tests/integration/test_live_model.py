"""Forms on a genuine language model: whatever uses a policy asks SmolLM2 the framed question and gives its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from query_mutator import Rewriter
from query_mutator.data.loaders import FOLDER
from query_mutator.llm.llama import LlamaBackend
from query_mutator.llm.recorded import RecordedBackend
from query_mutator.types import ChatRequest, Message
from tests.integration.killing import kill_when, start, train, transcript, weights
from tests.integration.live_plans import plan_file
from tests.qm_command import qm, serving

pytestmark = pytest.mark.slow

MODEL = "smollm2"  # what --gguf takes
FORM = "statement"
QUESTION = "hello there, plz tell me waht is the capital of France"
CLEANED = "What is the capital of France?"
FRAMED = f'The answer to the question "{CLEANED}" is'
TOKENS = 16
RECORDED_TOKENS = 32


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Give a model one core: tests run side by side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a plan that cleans the question and frames it."""
    folder = tmp_path_factory.mktemp("plan")
    return plan_file(folder, ("clean", FORM), gguf=(MODEL,), operators="clean", forms=FORM, target_max_tokens=TOKENS)


@pytest.fixture(scope="module")
def rewriter(plan: Path) -> Iterator[Rewriter]:
    with Rewriter.load(plan, gguf=MODEL) as found:
        yield found


@pytest.fixture(scope="module")
def answer(rewriter: Rewriter) -> str:
    """Return the model's own reply to the framed question, which is that to no other wording or form."""
    (server,) = rewriter.models.calls.servers
    replies = [server.complete(rewriter.task.calls.target(text)) for text in (FRAMED, CLEANED, QUESTION)]
    assert all(reply.ok for reply in replies)
    texts = [reply.text for reply in replies]
    assert texts[0] not in texts[1:]
    return texts[0]


def test_a_rewriter_asks_in_the_form(rewriter: Rewriter, answer: str) -> None:
    found = rewriter.rewrite(QUESTION)
    assert (found.text, found.form, found.calls) == (CLEANED, FORM, 1)
    assert found.messages == (Message(role="user", content=FRAMED),)
    assert found.answer == answer


def test_qm_rewrite_asks_in_the_form(plan: Path, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("rewrite", QUESTION, "--checkpoint", plan, "--gguf", MODEL, "--json", "-") == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["submitted"], row["form"], row["answer"]) == (CLEANED, FORM, answer)
    assert row["messages"] == [{"role": "user", "content": FRAMED}]


def test_qm_batch_asks_in_the_form(plan: Path, answer: str, tmp_path: Path) -> None:
    body = {"model": "any", "max_tokens": TOKENS, "messages": [{"role": "user", "content": QUESTION}]}
    rows = [{"id": "a", "prompt": QUESTION}, {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions"}]
    rows[1]["body"] = body  # type: ignore[assignment]
    asked, out = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    asked.write_text("\n".join(map(json.dumps, rows)))
    assert qm("batch", asked, "-o", out, "--checkpoint", plan, "--gguf", MODEL) == 0
    one, other = map(json.loads, out.read_text().splitlines())
    assert (one["rewrite"], one["form"], one["answer"]) == (CLEANED, FORM, answer)
    assert other["query_mutator"]["form"] == FORM
    assert other["response"]["body"]["choices"][0]["message"]["content"] == answer


def test_qm_serve_asks_in_the_form_for_the_official_client(plan: Path, answer: str, tmp_path: Path) -> None:
    with serving(plan, tmp_path, "--gguf", MODEL, "--mode", "blind") as (_, url):
        headers: list[Any] = []
        texts: list[Any] = []
        messages: Any = [{"role": "user", "content": QUESTION}]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
            create = client.chat.completions.with_raw_response.create
            (model,) = {one.id for one in client.models.list() if one.id.endswith("+qm")}
            settings: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0, "max_tokens": TOKENS}
            whole, parts = create(**settings), create(**settings, stream=True)
            headers += [whole.headers, parts.headers]
            texts += [whole.parse().choices[0].message.content]
            texts += ["".join(one.choices[0].delta.content or "" for one in parts.parse() if one.choices)]
    assert [text and text.strip() for text in texts] == [answer] * 2
    assert [(found["x-qm-form"], found["x-qm-calls"]) for found in headers] == [(FORM, "1")] * 2


def test_a_training_that_is_killed_resumes_to_the_weights_of_a_whole_one(tmp_path: Path) -> None:
    flags = [
        *("--gguf", MODEL, "--dataset", "general", "--encoder", "hash", "--operators", "clean", "--forms", FORM),
        *("--ask", "form", "--max-asks", "1", "--target-max-tokens", "8", "--embedding-dims", "4", "--deterministic"),
        *("--num-processes", "4", "--num-steps", "4", "--num-env-steps", "32", "--num-mini-batch", "2"),
        *("--no-evaluate", "--eval-interval", "0", "--cache-path", str(tmp_path / "replies.sqlite")),
    ]
    killed, whole = tmp_path / "killed" / "latest", tmp_path / "whole" / "latest"
    rows = killed / "transcripts.jsonl"
    trainer = start([*flags, "--save-dir", str(killed.parent)], tmp_path)
    assert kill_when(trainer, lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 20)
    train(["--resume", str(killed)], tmp_path)
    train([*flags, "--save-dir", str(whole.parent)], tmp_path)  # finds the same replies in the cache
    assert json.loads((whole / "summary.json").read_text())["llm_calls"] == 0
    assert transcript(killed) == transcript(whole)
    assert all((weights(killed)[name] == value).all() for name, value in weights(whole).items())


def test_recorded_replies_are_given_again() -> None:
    (source,), (server,) = (
        RecordedBackend.open([]),
        LlamaBackend.open([MODEL], pool_size=8, runner_options={"num_ctx": 1024}),
    )
    rows = map(json.loads, (FOLDER / "general.jsonl").read_text(encoding="utf-8").splitlines()[:40])
    model = source.recording.head.model
    asked = [ChatRequest.user(row["query"], model=model, max_tokens=RECORDED_TOKENS) for row in rows]
    known = [(request, reply) for request in asked if (reply := source.recording.find(request)) is not None][:12]
    with closing(server), ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(server.complete, [request for request, _ in known]))
    same = [reply.text == recorded.text for reply, (_, recorded) in zip(replies, known, strict=True)]
    assert len(same) == 12
    assert sum(same) >= 9
