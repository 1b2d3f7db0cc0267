"""Models that think aloud behind the proxy: a thought is not gated, and clients get the reply as it came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import requests

from query_mutator.encoder import Encoder
from query_mutator.runs.shadow import read_shadow
from query_mutator.testing import start_server
from tests.conftest import Librarian, Softener
from tests.integration.proxied import KILL, SORT, VIRTUAL, answer, chat, proxy
from tests.integration.test_shadow import outcomes, wait_for

REFUSAL = "I'm sorry, but I can't help with that. Ask something else."
LONG = "It goes on and on. " * 40


class Thinker(Librarian):
    """Thinks of a refusal and answers, or thinks of an answer and refuses; at "empty" it only thinks."""

    def reply(self, prompt: str) -> str:
        said = super().reply(prompt)
        if "empty" in prompt:
            return f"<think>{REFUSAL}"
        if "sorry" in said:
            return f"<think>`os.kill` is it. {LONG}</think>\n\n{REFUSAL}"
        return f"<think>{REFUSAL} {LONG}</think>\n\n{said} Use it."


class ThoughtfulSoftener(Softener):
    def reply(self, prompt: str) -> str:
        return f"<think>Perhaps: how to kill?</think>{super().reply(prompt)}"


def streamed(url: str, question: str) -> tuple[str, str]:
    """Return the decision on a question, and the streamed reply."""
    body = {"model": VIRTUAL, "stream": True, "messages": [{"role": "user", "content": question}]}
    reply = requests.post(f"{url}/api/chat", json=body, timeout=20)
    lines = [json.loads(line) for line in reply.text.splitlines()]
    return reply.headers["x-qm-decision"], "".join(line["message"]["content"] for line in lines)


@pytest.mark.parametrize("stream", [False, True])
def test_the_gate_reads_what_is_said(hash_encoder: Encoder, tmp_path: Path, stream: bool) -> None:
    shadow = tmp_path / "shadow.jsonl"
    with (
        start_server([Thinker(), ThoughtfulSoftener()], num_parallel=4) as server,
        proxy(server.url, hash_encoder, slots=8, shadow=shadow) as url,
    ):

        def asked(question: str) -> tuple[str, str]:
            if stream:
                return streamed(url, question)
            reply = chat(url, question)
            return reply.headers["x-qm-decision"], answer(reply)

        kept, refused, empty = asked(SORT), asked(KILL), asked("empty")
        wait_for(lambda: outcomes(url) == {"kept": 3})
    assert kept == ("kept", f"<think>{REFUSAL} {LONG}</think>\n\n`sorted` is what you want. Use it.")
    assert refused[0] == "rewritten"
    assert refused[1].endswith("</think>\n\n`os.kill` is what you want. Use it.")
    assert empty == ("kept", f"<think>{REFUSAL}")
    of_kept, of_refused, of_empty = read_shadow(shadow)
    assert of_kept["original"]["answer"] == "`sorted` is what you want. Use it."
    assert (of_refused["original"]["answer"], of_refused["original"]["refused"]) == (REFUSAL, True)
    assert of_refused["rewritten"]["answer"] == "`os.kill` is what you want. Use it."
    assert "think" not in of_refused["rewrite"]
    assert of_empty["original"]["answer"] == ""


@pytest.mark.parametrize("mode", ["blind", "full"])
def test_a_rewrite_has_no_thought(hash_encoder: Encoder, mode: str) -> None:
    with (
        start_server([Thinker(), ThoughtfulSoftener()], num_parallel=4) as server,
        proxy(server.url, hash_encoder, mode=mode) as url,  # type: ignore[arg-type]
    ):
        reply = chat(url, KILL)
    assert reply.headers["x-qm-decision"] == "rewritten"
    assert answer(reply).endswith("`os.kill` is what you want. Use it.")
