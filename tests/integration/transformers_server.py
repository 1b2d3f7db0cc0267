"""`transformers serve` on a tiny Llama with random weights. It lists no models of a folder, and reports no context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.integration.real_server import RealServer
from tests.tiny_lm import TEXTS, new_llama, new_tokenizer, save_scratch

__all__ = ["CONTEXT", "TransformersServer", "write_model"]

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
