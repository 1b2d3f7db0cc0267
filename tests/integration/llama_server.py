"""llama.cpp's own server in a process that tests can kill, on a tiny model with random weights.

The server comes from the wheel `xllamacpp`. The model has one token per byte, and its replies are random words of
lower-case letters. A prompt has about as many tokens as characters.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.integration.real_server import RealServer

CONTEXT = 2048  # tokens of a slot
MODEL = "tiny"  # the file's name without its ending, under which the server lists it
_WIDTH, _LAYERS, _HEADS = 64, 2, 4
_END = 256  # the token that ends a reply
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def write_gguf(folder: Path, *, seed: int = 0, template: str = _TEMPLATE) -> Path:
    """Write a Llama of two layers with random weights and a byte-level tokenizer as llama.cpp reads it."""
    import gguf

    path = folder / f"{MODEL}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(MODEL)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(2 * _WIDTH)
    writer.add_head_count(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer)
    if template:
        writer.add_chat_template(template)
    for name, weight in _weights(np.random.default_rng(seed)).items():
        writer.add_tensor(name, weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: object) -> None:
    """Add 256 bytes as GPT-2 spells them, the end of a reply, and one merge, as a tokenizer without any is refused."""
    from gguf import GGUFWriter, TokenType

    assert isinstance(writer, GGUFWriter)
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}  # GPT-2 moves the other bytes to 256 and above
    moved = iter(range(256, 512))
    spelled = [chr(byte if byte in plain else next(moved)) for byte in range(256)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*spelled, "<|end|>", "th"])
    writer.add_token_types([*[TokenType.NORMAL] * 256, TokenType.CONTROL, TokenType.NORMAL])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(_END)
    writer.add_eos_token_id(_END)
    writer.add_add_bos_token(False)


def _weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the tensors [out, in]; the residual's dimension 0 is a bias, 1 marks the end of the prompt."""

    def random(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape)

    embeddings, output = random(258, _WIDTH), random(258, _WIDTH)
    embeddings[:, :2] = 3.0, 0.0
    embeddings[ord("\n"), 1] = 3.0
    output[:, 0] = -100.0
    output[[*range(ord("a"), ord("z") + 1)], :2] = 0.0
    output[[ord(" "), ord("."), _END], 0] = 1.0, 0.5, 0.7
    output[[ord(" "), ord("."), _END], 1] = -100.0  # no empty replies
    tensors = {"token_embd.weight": embeddings, "output.weight": output, "output_norm.weight": np.ones(_WIDTH)}
    for layer in range(_LAYERS):
        block = {
            **{f"attn_{name}": random(_WIDTH, _WIDTH) for name in ("q", "k", "v", "output")},
            **{f"ffn_{name}": random(2 * _WIDTH, _WIDTH) for name in ("gate", "up")},
            "ffn_down": random(_WIDTH, 2 * _WIDTH),
            **{f"{name}_norm": np.ones(_WIDTH) for name in ("attn", "ffn")},
        }
        block["attn_output"][:2] = block["ffn_down"][:2] = 0.0
        tensors |= {f"blk.{layer}.{name}.weight": weight for name, weight in block.items()}
    return tensors


class LlamaServer(RealServer):
    """The server with `slots` slots of `CONTEXT` tokens; with `embeds` it makes embeddings instead of replies."""

    def __init__(self, model: Path, *, slots: int = 1, embeds: bool = False) -> None:
        self.slots = slots
        self._embeds = embeds
        self._model = model
        super().__init__(model.parent)

    def command(self) -> Sequence[str | Path]:
        """Return this module as a command."""
        flags = (str(self.port), str(self.slots), *(["embeds"] if self._embeds else []))
        return ["-m", "tests.integration.llama_server", self._model, *flags]


def serve(model: str, port: int, slots: int, *, embeds: bool) -> None:
    """Serve a model until the process is killed."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = {MODEL}
    params.port = port
    params.n_parallel = slots
    params.n_ctx = CONTEXT * slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    if embeds:
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), embeds="embeds" in sys.argv[4:])
