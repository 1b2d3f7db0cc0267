"""The client against real servers that are not ours: llama.cpp's and transformers'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from query_mutator.commands.main import main
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.llm.stack import build_client
from query_mutator.types import ChatRequest
from tests.fake_client import kind_of
from tests.integration.llama_server import CONTEXT, MODEL, LlamaServer
from tests.integration.real_server import RealServer
from tests.tiny_lm import TEXTS, new_llama, new_tokenizer, save_scratch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[1, 4])
def server(request: pytest.FixtureRequest, tiny_gguf: Path) -> Iterator[LlamaServer]:
    with LlamaServer(tiny_gguf, slots=request.param) as running:
        yield running


@pytest.fixture
def backend(server: LlamaServer) -> Iterator[OpenAIBackend]:
    with closing(OpenAIBackend(server.url, pool_size=8)) as found:
        yield found


def ask(text: str, **fields: object) -> ChatRequest:
    return ChatRequest.user(text, model=MODEL, max_tokens=24, **fields)


def test_replies_have_counts_and_times(backend: OpenAIBackend) -> None:
    for number in range(6):
        request = ask(f"question {number}", seed=number)
        whole = backend.complete(request)
        assert whole.ok
        assert min(whole.prompt_tokens, whole.completion_tokens) > 0
        assert 0 < whole.eval_s < whole.latency_s
    assert backend.models() == (MODEL,)


def test_as_many_calls_as_there_are_slots_and_more_get_their_own_reply(backend: OpenAIBackend) -> None:
    requests = [ask(f"number {number}", seed=0) for number in range(32)]
    alone = [backend.complete(request).text for request in requests]
    with ThreadPoolExecutor(8) as pool:
        together = [reply.text for reply in pool.map(backend.complete, requests)]
    assert len(set(alone)) > 16
    assert together == alone


def test_a_prompt_beyond_the_context_of_a_slot_is_an_error_with_both_numbers(backend: OpenAIBackend) -> None:
    reply = backend.complete(ask("word " * CONTEXT))
    assert reply.error is not None
    assert (reply.error.kind, reply.error.status, reply.text) == ("prompt_too_long", 400, "")
    assert f"exceeds the available context size ({CONTEXT} tokens)" in reply.error.message
    assert "--ctx-size" in reply.error.message


def test_doctor_says_the_slots_and_the_context_that_the_server_reports(
    server: LlamaServer, backend: OpenAIBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (backend.slots(MODEL), backend.context(MODEL)) == (server.slots, CONTEXT)
    assert main(["doctor", "--openai-url", server.url]) == 0
    doctor = capsys.readouterr().out
    fix = "start it with {} slots (vLLM --max-num-seqs, llama-server --parallel)"
    answers = f"server answers {server.slots} call{'s' * (server.slots > 1)} at a time: {fix}"
    assert f"slots:   {server.slots}, as the server reports" in doctor
    assert f"set:     --batch-size {server.slots} --num-processes {2 * server.slots}: at most" in doctor
    assert f"context: {CONTEXT} tokens: a reply of 256 leaves {CONTEXT - 256} for a prompt" in doctor
    assert "reload:  none, calls set no options of the loaded model" in doctor
    assert answers.format(8) in doctor
    assert ("batching cannot help" in doctor) == (server.slots == 1)


def test_a_reply_that_ends_at_the_token_limit_is_marked(backend: OpenAIBackend) -> None:
    replies = [backend.complete(ask(f"how long {number}")) for number in range(20)]
    assert {reply.hit_limit for reply in replies} == {True, False}
    assert all(reply.hit_limit == (reply.completion_tokens == 24) for reply in replies)


def test_a_server_that_is_killed_and_restarted_is_used_again(tiny_gguf: Path) -> None:
    with LlamaServer(tiny_gguf) as server:
        stack = build_client(server.url, backend="openai", max_retries=0)
        first = stack.client.complete(ask("one", seed=0))
        server.kill()
        gone = stack.client.complete(ask("two"))
        server.start()
        again = stack.client.complete(ask("one", seed=0))
        stack.close()
    assert kind_of(gone) == "connect"
    assert (first.ok, again.text) == (True, first.text)


POSITIONS = 1024  # positions of the model; the server goes past them without a word


def write_model(folder: Path) -> Path:
    """Save a Llama whose random replies are letters and words, and its tokenizer with a chat template."""
    import torch

    tokenizer = new_tokenizer(TEXTS, vocab_size=320)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    model = new_llama(tokenizer, positions=POSITIONS)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0, 0.5)
        plain = [tokenizer.decode([token]).strip().isalnum() for token in range(len(tokenizer))]
        model.get_input_embeddings().weight[~torch.tensor(plain)] = 0.0  # rarely the most likely
    return save_scratch(folder, tokenizer, model)


class TransformersServer(RealServer):
    """The server that comes with transformers, which answers one call at a time."""

    def __init__(self, model: Path) -> None:
        self.model = str(model)
        self.environ = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(model / "home"), "OMP_NUM_THREADS": "1"}
        super().__init__(model)

    def command(self) -> Sequence[str | Path]:
        """Return the `transformers` command."""
        start = "from transformers.cli.transformers import main; main()"
        where = ("--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu")
        return ["-c", start, "serve", self.model, *where]


def test_a_prompt_beyond_the_context_fails_where_num_ctx_says_what_it_is(tmp_path: Path) -> None:
    with (
        TransformersServer(write_model(tmp_path)) as server,
        closing(OpenAIBackend(server.url, runner_options={"num_ctx": POSITIONS})) as backend,
    ):
        assert backend.require_model(server.model) == server.model
        whole = backend.complete(ChatRequest.user("how do i sort", model=server.model, max_tokens=8, seed=0))
        assert (whole.ok, whole.completion_tokens, whole.hit_limit) == (True, 8, True)
        long = ChatRequest.user("how do i sort my list " * 200, model=server.model, max_tokens=8)
        assert kind_of(backend.complete(long)) == "prompt_too_long"
