"""`python -m query_mutator.embedded`: the embedded server in a process of its own."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from query_mutator.embedded.catalogue import EMBEDDING_MODEL
from query_mutator.embedded.faults import KINDS, FaultPlan
from query_mutator.embedded.models import Babble, Echo
from query_mutator.embedded.server import start_server
from query_mutator.errors import EXIT_USAGE, QueryMutatorError, UsageError
from query_mutator.registry import nearest

if TYPE_CHECKING:
    from types import FrameType

    from query_mutator.embedded.models import EmbeddedModel
    from query_mutator.encoder import Encoder

PROGRAM = "python -m query_mutator.embedded"
_ENDINGS = (signal.SIGINT, signal.SIGTERM)
MODEL_NAMES = ("pydoc-assistant", "rule-rewriter", EMBEDDING_MODEL, Echo.name, Babble.name)


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag in one line, with the nearest name for a typo."""

    def error(self, message: str) -> NoReturn:
        typo = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        near = nearest(typo[1], self._option_string_actions) if typo else None
        hint = f" (did you mean {near}?)" if near else "; --help lists the flags"
        self.exit(EXIT_USAGE, f"{PROGRAM}: {message}{hint}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code, 0 then and 2 for what cannot be served."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        arguments = _parser().parse_args(argv)
        for number in _ENDINGS:
            signal.signal(number, _leave)
        _serve(arguments)
    except (QueryMutatorError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def _serve(arguments: argparse.Namespace) -> None:
    faults = None
    if arguments.faults:
        faults = FaultPlan(arguments.faults, kinds=_names(arguments.fault_kinds), seed=arguments.seed)
    models, encoder = _models(_names(arguments.model), arguments.encoder, deterministic=arguments.deterministic)
    # From here on signals are waited for: a handler that raised could strike in the middle of a lock.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
    with start_server(
        models,
        encoder=encoder,
        host=arguments.host,
        port=arguments.port,
        num_parallel=arguments.num_parallel,
        max_queue=arguments.max_queue,
        load_ms=arguments.load_ms,
        latency_ms=arguments.latency_ms,
        latency_sigma=arguments.latency_sigma,
        running_speed=arguments.running_speed,
        seed=arguments.seed,
        faults=faults,
    ) as server:
        print(f"listening on {server.url}", flush=True)
        signal.sigwait(_ENDINGS)
        for number in _ENDINGS:  # a second one ends the process at once
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)


def _models(
    names: Sequence[str], encoder_name: str, *, deterministic: bool
) -> tuple[dict[str, EmbeddedModel], Encoder | None]:
    """Return the text models and, when one of them needs it, the encoder; `echo` alone loads nothing."""
    for name in names:
        if name not in MODEL_NAMES:
            near = nearest(name, MODEL_NAMES)
            hint = f" (did you mean {near!r}?)" if near else ""
            raise UsageError(f"unknown model {name!r}{hint}; known: {', '.join(MODEL_NAMES)}")
    light: dict[str, EmbeddedModel] = {Babble.name: Babble()} if Babble.name in names else {}
    if set(names) <= {Echo.name, Babble.name}:
        return light, None
    from query_mutator.embedded.default_models import default_models
    from query_mutator.encoder import resolve_encoder

    encoder = resolve_encoder(encoder_name, deterministic=deterministic)
    models = {name: model for name, model in default_models(encoder).items() if name in names}
    return models | light, encoder if EMBEDDING_MODEL in names else None


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parser() -> _Parser:
    parser = _Parser(
        prog=PROGRAM,
        description="Serve Query Mutator's embedded models over the Ollama and OpenAI HTTP interfaces.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=11434, help="port to listen on; 0 takes a free one")
    add(
        "--model",
        default=",".join(MODEL_NAMES),
        help="models to serve, with commas; `echo` and `babble` load no encoder",
    )
    add("--encoder", default="all-MiniLM-L6-v2", help="sentence encoder: a name, a folder or `hash`")
    add("--deterministic", action="store_true", help="encode one row at a time, so that batching changes no bit")
    _add_queue_flags(add)
    _add_latency_flags(add)
    return parser


def _add_queue_flags(add: Callable[..., argparse.Action]) -> None:
    slots = os.environ.get("OLLAMA_NUM_PARALLEL") or "1"
    queue = os.environ.get("OLLAMA_MAX_QUEUE") or "512"
    add("--num-parallel", type=int, default=slots, help="slots of each model (environment: OLLAMA_NUM_PARALLEL)")
    add("--max-queue", type=int, default=queue, help="requests that may wait for a load (OLLAMA_MAX_QUEUE)")


def _add_latency_flags(add: Callable[..., argparse.Action]) -> None:
    add(
        "--latency-ms", type=float, default=0.0, help="mean time of a call in its slot, computing included; 0 adds none"
    )
    add(
        "--latency-sigma", type=float, default=0.0, help="spread of that time: log-normal, the same for the same prompt"
    )
    add("--running-speed", type=float, default=0.0, help="16 s / X per call, in place of --latency-ms; 0 adds none")
    add("--load-ms", type=float, default=0.0, help="time a model takes to load, and to load again with other options")
    add("--seed", type=int, default=0, help="seed of latencies and faults")
    add("--faults", type=float, default=0.0, help="share of calls that fail on purpose, 0 to 1")
    add("--fault-kinds", default=",".join(KINDS), help="how they fail, with commas")
