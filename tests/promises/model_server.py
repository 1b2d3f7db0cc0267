"""The model server of the promises: `query_mutator.testing` with models of known answers, and knobs while it runs.

    python tests/promises/model_server.py '{"num_parallel": 4, "latency_ms": 5}'

It prints `listening on http://127.0.0.1:PORT knobs http://127.0.0.1:PORT`. Settings are those of `start_server`, the
knobs below, and `api_key`: calls without that key are refused, and the keys that came are kept; "" only keeps them. Its
models:

    librarian   answers right when it knows a word of the prompt and sees no noise; refuses "kill"; else is not sure
    softener    a mutator: drops noise words, corrects some words, says "stop" for "kill"
    echo        answers with the prompt
    endless     writes 10,000 words a long way apart: a megabyte takes a thousand tokens

The second address has one model, `knobs`: it takes knobs as JSON, and answers with the prompts and keys seen so far.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from aiohttp import ClientSession, web

from query_mutator.testing import FaultPlan, Latency, PromptError, start_server

#: Known words and answers of `librarian`; tests/promises/helpers.py makes questions of them.
SHELF = {
    "capital": "Paris", "planet": "Jupiter", "boils": "100", "author": "Tolstoy", "metal": "mercury",
    "ocean": "Pacific", "river": "Nile", "mountain": "Everest", "painter": "Leonardo", "currency": "yen",
    "language": "Portuguese",
    "element": "helium", "bone": "femur", "organ": "skin", "desert": "Sahara", "animal": "cheetah", "bird": "ostrich",
    "tree": "sequoia", "gas": "nitrogen", "stone": "diamond", "island": "Greenland", "lake": "Baikal", "city": "Tokyo",
    "country": "Russia",
}  # fmt: skip
NOISE = {"plz", "umm", "lol", "thx"}
SPELLING = {
    "kill": "stop",
    "captal": "capital",
    "plannet": "planet",
    "authr": "author",
    "rivr": "river",
    "ocaen": "ocean",
}
REFUSAL = "I'm sorry, but I can't help with that."

#: Mean time of a call and its log-normal spread, share of failing calls and its seed, a word that makes a call fail.
knobs: dict[str, Any] = {"latency_ms": 0, "latency_sigma": 0, "faults": 0, "seed": 0, "fail_word": ""}
plan = FaultPlan(0, kinds=["500", "reset", "cut"])
prompts: list[tuple[str, str]] = []
keys: list[str] = []


def librarian(prompt: str) -> str:
    """Return the answer to a question."""
    words = re.findall(r"[\w']+", prompt.lower())
    if "kill" in words:
        return REFUSAL
    found = next((SHELF[word] for word in words if word in SHELF), None)
    return f"It is {found}." if found and not NOISE.intersection(words) else "I'm not sure what you mean."


def softener(prompt: str) -> str:
    """Return the rewrite of a question, or of an answer."""
    tag = "question" if "<question>" in prompt else "answer"
    text = prompt.split(f"<{tag}>")[-1].split(f"</{tag}>")[0]
    return " ".join(SPELLING.get(word, word) for word in text.split() if word.lower() not in NOISE)


MODELS: dict[str, Callable[[str], str]] = {
    "librarian": librarian,
    "softener": softener,
    "echo": lambda prompt: prompt,
    "endless": lambda prompt: (" " * 1000 + "word") * 10_000,
}


class Model:
    """A function of a prompt, which takes the time of a call and has its failure."""

    threads = 64

    def __init__(self, name: str) -> None:
        self.name = name

    def reply(self, text: str) -> str:
        """Return the reply."""
        prompts.append((self.name, text))
        time.sleep(Latency(mean_s=knobs["latency_ms"] / 1000, sigma=knobs["latency_sigma"]).total_s(text))
        if knobs["fail_word"] in text.split():
            raise PromptError("the runner has crashed", status=500)
        return MODELS[self.name](text)


class Knobs:
    """A model that changes knobs and says what the others saw."""

    name = "knobs"

    def reply(self, text: str) -> str:
        """Take the knobs of a text; `{"forget": true}` forgets prompts and keys."""
        knobs.update(json.loads(text))
        plan.share, plan.seed = knobs["faults"], knobs["seed"]
        if knobs.pop("forget", False):
            prompts.clear()
            keys.clear()
        return json.dumps({"prompts": prompts, "keys": keys})


async def guard(url: str, api_key: str, say: Callable[[str], None]) -> None:
    """Serve what `url` serves to clients that have the key, if there is one; keep all keys that come."""

    async def forward(request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "")
        if key and key not in keys:
            keys.append(key)
        if api_key and key != f"Bearer {api_key}" and not request.path.startswith("/debug"):
            return web.json_response({"error": {"message": "invalid API key"}}, status=401)
        async with session.request(request.method, url + request.path_qs, data=await request.read()) as reply:
            return web.Response(status=reply.status, body=await reply.read(), content_type=reply.content_type)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    async with ClientSession() as session:
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        say(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()


def main() -> None:
    """Serve until the process ends."""
    settings = {"num_parallel": 64, **json.loads(sys.argv[1])}
    api_key = settings.pop("api_key", None)
    first = {name: settings.pop(name) for name in knobs.keys() & settings.keys()}
    models = [Model(name) for name in MODELS]
    with start_server(models, faults=plan, **settings) as server, start_server([Knobs()]) as control:
        Knobs().reply(json.dumps(first))

        def say(url: str) -> None:
            print(f"listening on {url} knobs {control.url}", flush=True)

        if api_key is None:
            say(server.url)
            threading.Event().wait()
        asyncio.run(guard(server.url, api_key, say))


if __name__ == "__main__":
    main()
