"""`python -m query_mutator.embedded`: the embedded server in its own process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NoReturn

from query_mutator.bounds import Share, defaults
from query_mutator.cli.console import exit_code, log_to_stderr
from query_mutator.cli.flags import parse_flags
from query_mutator.embedded.catalogue import EMBEDDING_MODEL
from query_mutator.embedded.faults import KINDS, FaultPlan
from query_mutator.embedded.models import Babble, Echo
from query_mutator.embedded.server import ServerSettings, start_server
from query_mutator.errors import UsageError
from query_mutator.llm.address import DEFAULT_PORT
from query_mutator.registry import check_known
from query_mutator.settings.models import Encoding

if TYPE_CHECKING:
    from query_mutator.embedded.models import EmbeddedModel
    from query_mutator.encoder import Encoder

__all__ = ["EmbeddedFlags", "main"]

PROG = "python -m query_mutator.embedded"
_ENDINGS = (signal.SIGINT, signal.SIGTERM)
MODEL_NAMES = (Echo.name, Babble.name, EMBEDDING_MODEL)


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise UsageError(f"the environment variable {name} must be a whole number, not {text!r}")
    return int(text)


@dataclass(frozen=True, kw_only=True)
@defaults(
    port=DEFAULT_PORT,
    num_parallel=field(default_factory=lambda: _from_environment("OLLAMA_NUM_PARALLEL", ServerSettings.num_parallel)),
    max_queue=field(default_factory=lambda: _from_environment("OLLAMA_MAX_QUEUE", ServerSettings.max_queue)),
    origins=field(default_factory=lambda: tuple(_names(os.environ.get("OLLAMA_ORIGINS", "")))),
)
class EmbeddedFlags(ServerSettings):
    """Serve Query Mutator's embedded models over the Ollama and OpenAI HTTP interfaces.

    OLLAMA_NUM_PARALLEL, OLLAMA_MAX_QUEUE and OLLAMA_ORIGINS set the defaults of these flags.
    """

    model: str = ",".join(MODEL_NAMES)
    """Models to serve, as a,b,c; echo and babble load no encoder."""
    encoder: str = Encoding.encoder
    """Sentence encoder: a name, a folder or hash."""
    deterministic: bool = False
    """Encode one row at a time, so that batching changes no bit."""
    faults: Share = 0.0
    """Share of calls that fail on purpose, from 0 to 1."""
    fault_kinds: str = ",".join(KINDS)
    """Ways in which they fail, as a,b,c."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code, 0 then and 2 for what cannot be served."""
    log_to_stderr("%(levelname)s %(name)s: %(message)s")
    return exit_code(_serve, sys.argv[1:] if argv is None else argv, prog=PROG)


def _serve(argv: Sequence[str]) -> int:
    flags = parse_flags(EmbeddedFlags, argv, prog=PROG)
    for number in _ENDINGS:
        signal.signal(number, _leave)
    faults = FaultPlan(flags.faults, kinds=_names(flags.fault_kinds), seed=flags.seed) if flags.faults else None
    models, encoder = _models(_names(flags.model), flags.encoder, deterministic=flags.deterministic)
    settings = {one.name: getattr(flags, one.name) for one in fields(ServerSettings)}
    # From here on signals are waited for: a handler that raised could strike while a lock is held.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
    with start_server(models, encoder=encoder, faults=faults, **settings) as server:
        print(f"listening on {server.url}", flush=True)
        signal.sigwait(_ENDINGS)
        for number in _ENDINGS:  # a second one ends the process at once
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)
    return 0


def _leave(*_: object) -> NoReturn:
    raise SystemExit(0)


def _models(
    names: Sequence[str], encoder_name: str, *, deterministic: bool
) -> tuple[dict[str, EmbeddedModel], Encoder | None]:
    """Return the text models and, if one of them needs it, the encoder; echo and babble need none."""
    for name in names:
        check_known("model", name, MODEL_NAMES)
    models: dict[str, EmbeddedModel] = {model.name: model for model in (Echo(), Babble()) if model.name in names}
    if EMBEDDING_MODEL not in names:
        return models, None
    from query_mutator.encoder import resolve_encoder

    return models, resolve_encoder(encoder_name, deterministic=deterministic)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
