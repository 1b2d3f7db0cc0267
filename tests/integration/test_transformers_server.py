"""The client against `transformers serve`, which lists no models of a folder, and reports no context."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from query_mutator.llm.openai import OpenAIBackend
from query_mutator.types import ChatRequest
from tests.fake_client import kind_of
from tests.integration.real_server import RealServer
from tests.tiny_lm import TEXTS, new_llama, new_tokenizer, save_scratch

CONTEXT = 1024  # positions of the model; the server goes past them without a word


def write_model(folder: Path) -> Path:
    """Save a Llama whose random replies are letters and words, and its tokenizer with a chat template."""
    import torch

    tokenizer = new_tokenizer(TEXTS, vocab_size=320)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    model = new_llama(tokenizer, positions=CONTEXT)
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


@pytest.mark.slow
def test_a_prompt_beyond_the_context_fails_where_num_ctx_says_what_it_is(tmp_path: Path) -> None:
    with (
        TransformersServer(write_model(tmp_path)) as server,
        closing(OpenAIBackend(server.url, runner_options={"num_ctx": CONTEXT})) as backend,
    ):
        assert backend.require_model(server.model) == server.model
        whole = backend.complete(ChatRequest.user("how do i sort", model=server.model, max_tokens=8, seed=0))
        assert (whole.ok, whole.completion_tokens, whole.hit_limit) == (True, 8, True)
        long = ChatRequest.user("how do i sort my list " * 200, model=server.model, max_tokens=8)
        assert kind_of(backend.complete(long)) == "prompt_too_long"
