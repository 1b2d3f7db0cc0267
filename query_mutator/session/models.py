"""Open the models that a run needs: server, client and encoder.

Used by the command lines, by `Rewriter` and by `gymnasium.make("rl_query_mutator_env:QueryMutation-v0")`.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from query_mutator.bounds import group_of
from query_mutator.cli.console import closing_on_interrupt, show_status
from query_mutator.encoder import CachedEncoder, resolve_encoder, unit_rows
from query_mutator.errors import UsageError
from query_mutator.files.replies import Recording
from query_mutator.llm.backends import (
    BACKENDS,
    DEFAULT_BACKEND,
    RECORDED,
    BackendChoice,
    choose_backend,
    resolve_backend,
)
from query_mutator.llm.client import RetryPolicy
from query_mutator.llm.prices import in_words, read_prices
from query_mutator.llm.stack import ClientStack, build_client
from query_mutator.llm.store import default_cache_path, seconds_seen
from query_mutator.settings import ADDRESS_FLAGS, RECORDED_SET, CacheMode, Calls, ModelSettings
from query_mutator.types import FloatArray, read_part


@dataclass(frozen=True, kw_only=True)
class ResolvedModels(ModelSettings):
    """The settings of models that were open, with every choice made, so that the same ones can be opened again."""

    file_digests: tuple[str, ...] = ()
    """SHA-256 that the files of `gguf` or `recording` must have; without any they are not compared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenModels(AbstractContextManager["OpenModels"]):
    """The models of a run behind one client, and the encoder; a context manager that stops what was started.

    In a command line the first Ctrl-C closes the calls too, so that nothing waits for a reply.
    """

    settings: ModelSettings
    choice: BackendChoice
    calls: ClientStack
    encoder: CachedEncoder
    target_model: str
    mutator_model: str
    resources: ExitStack = field(repr=False)

    @property
    def retry_policy(self) -> RetryPolicy:
        """Return which failed calls are repeated, for a scheduler that waits before retries itself."""
        return self.calls.retry.policy

    @property
    def resolved(self) -> ResolvedModels:
        """Return the settings with the choices filled in."""
        return group_of(
            ResolvedModels,
            self.settings,
            **{**dict.fromkeys(ADDRESS_FLAGS), **self.choice.addresses},
            backend=self.choice.kind,
            batch_size=self.settings.calls_in_flight,
            cache=_cache_mode(self.settings, self.choice),
            file_digests=self.calls.servers[0].file_digests(),
            target_model=(self.target_model, *self.settings.target_model[1:]),
            mutator_model=self.mutator_model,
            price=in_words(read_prices(self.settings.price, self.targets)) if self.has_prices else "",
        )

    @property
    def has_prices(self) -> bool:
        """Return whether calls have prices, of which the sum counts in place of their number."""
        return bool(self.settings.price) or len(self.targets) > 1

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the names of the models that answer."""
        return tuple(self.settings.targets) or (self.target_model,)

    def close(self) -> None:
        """Close connections and server; idempotent."""
        self.resources.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_models(settings: ModelSettings, *, dataset: str | None = None) -> OpenModels:
    """Start and connect what `settings` name; UsageError or BackendError for a model that no server has.

    Without a server, recorded replies answer the questions of `dataset` if it is the bundled set. The files of
    ResolvedModels must have their digests.
    """
    with ExitStack() as stack:
        # Calls search and encode from many threads at once: additional BLAS threads would outnumber the cores.
        stack.enter_context(threadpool_limits(1, user_api="blas"))
        choice = resolve_backend(
            settings.backend,
            target_model=settings.first_model,
            mutator_model=settings.mutator_model,
            has_recording=dataset == RECORDED_SET,
            **{flag: getattr(settings, flag) for flag in ADDRESS_FLAGS},
        )
        backend, urls, cache = choice.kind, choice.urls, _cache_mode(settings, choice)
        if backend == RECORDED and settings.simulated_s:
            backend, urls = DEFAULT_BACKEND, (_serve_recorded(settings, choice, stack),)
        elsewhere = {name: url for name, url in settings.targets.items() if url}
        how = group_of(Calls, settings, cache=cache)
        calls = build_client(urls, how, backend=backend, show=show_status, elsewhere=elsewhere)
        stack.callback(calls.close)
        own, other = choice.default_models or (None, None)
        target = settings.first_model or own
        assert target is not None  # `resolve_backend` requires one
        mutator = settings.mutator_model or other or target
        if isinstance(settings, ResolvedModels):
            for server in calls.servers if settings.file_digests else ():
                if settings.file_digests != server.file_digests():
                    raise UsageError(
                        f"{', '.join(server.addresses())} changed since this policy was trained; give the earlier "
                        f"file, or name this one with --{server.url_flag} in a new run"
                    )
        calls.require_models([*(settings.targets or (target,)), mutator])
        encoder = resolve_encoder(settings.encoder, device=settings.device, deterministic=settings.deterministic)
        if choice.recording is not None:
            encoder.known = known_rows(choice.recording, encoder.fingerprint)
        stack.enter_context(closing_on_interrupt(calls.close))
        stack.callback(calls.close)  # first of all, so that nothing waits for a reply
        return OpenModels(
            settings=settings,
            choice=choice,
            calls=calls,
            encoder=encoder,
            target_model=target,
            mutator_model=mutator,
            resources=stack.pop_all(),
        )


def _serve_recorded(settings: ModelSettings, choice: BackendChoice, stack: ExitStack) -> str:
    """Serve recorded replies over HTTP, each after its simulated time; return the address, with Ollama's routes."""
    from query_mutator.testing import start_server

    [recorded] = BACKENDS.get(choice.kind).open(choice.urls)
    assert choice.default_models is not None
    answer = partial(recorded.complete)
    answer.is_instant = True  # type: ignore[attr-defined]  # a lookup
    server = start_server(
        {choice.default_models[0]: answer},
        num_parallel=settings.calls_in_flight,
        latency_ms=1000 * settings.simulated_s,
        latency_sigma=settings.latency_sigma,
    )
    stack.callback(server.close)
    return server.url


def _cache_mode(settings: ModelSettings, choice: BackendChoice) -> CacheMode:
    """Return which replies are cached on disk, with `auto` resolved."""
    if settings.cache != "auto":
        return settings.cache
    return "off" if BACKENDS.get(choice.kind).is_instant else "all"


MODEL_CALL_S = 2.0  # a model of about 3 B parameters on a desktop GPU


def is_instant(settings: ModelSettings) -> bool:
    """Return whether calls take next to no time, as those to recorded replies do."""
    kind, _ = choose_backend(settings.backend, settings.urls)
    return BACKENDS.get(kind).is_instant


def call_time(settings: ModelSettings) -> tuple[float, str]:
    """Return the seconds of a call, divided by the calls in flight, and the words for where they come from."""
    in_flight = settings.calls_in_flight
    if is_instant(settings):
        simulated = f"{settings.simulated_s:g} s a call, {in_flight} in flight" if settings.simulated_s else "no wait"
        return settings.simulated_s / in_flight, f"{simulated}, as replies are recorded"
    models = {name.removesuffix(":latest") for name in (*settings.targets, settings.mutator_model) if name}
    seen = seconds_seen(settings.cache_path or default_cache_path(), models)
    known = "assumed: no reply of these models is kept" if seen is None else "as the newest replies that are kept"
    call_s = MODEL_CALL_S if seen is None else seen
    return call_s / in_flight, f"{call_s:.3g} s a call, {known}, {in_flight} in flight"


# --- embeddings that come with recorded replies ----------------------------------------------------------------------

VECTORS_FORMAT = "query_mutator/reply-vectors/1"


def vectors_path(recording: Path) -> Path:
    """Return where the rows of a recording's replies are."""
    return recording.with_name(recording.name.partition(".")[0] + ".vectors.npz")


def known_rows(recording: Recording, fingerprint: str) -> Callable[[str], FloatArray | None]:
    """Return what gives the unit rows [D] of a recording's replies by the encoder of a fingerprint, as far as known.

    A run on them so encodes few texts. A row is turned to its K principal axes and cut into P pieces, and of each piece
    the number of the nearest of 256 typical ones is kept, a byte (product quantization, Jégou et al. 2011,
    doi:10.1109/TPAMI.2010.57). scripts/reply_vectors.py makes the file, of n texts: axes [K, D] and pieces
    [P, 256, K / P], the typical ones, in float16; codes [n, P], their numbers; texts [n], places among the recording's
    texts. UsageError for a damaged file.
    """
    path = vectors_path(recording.path)
    if not path.exists():
        return lambda text: None
    try:
        with np.load(path, allow_pickle=False) as saved:
            about: dict[str, Any] = json.loads(str(saved["about"]))
            if about != {
                "format": VECTORS_FORMAT,
                "recording": recording.sha256,
                "encoder": fingerprint.partition(":")[0],
            }:
                return lambda text: None
            axes, pieces = saved["axes"].astype(np.float32), saved["pieces"].astype(np.float32)
            codes, places = saved["codes"], saved["texts"].tolist()
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: {error}; damaged: restore it, or delete it to encode the replies again") from None
    texts, numbers = recorded_texts(recording), np.arange(len(pieces))
    code_of = {texts[place]: code for place, code in zip(places, codes, strict=True)}

    def row_of(text: str) -> FloatArray | None:
        code = code_of.get(text)
        return None if code is None else unit_rows(pieces[numbers, code].reshape(1, -1) @ axes)[0]

    return row_of


def recorded_texts(recording: Recording) -> list[str]:
    """Return what is read of the replies of a recording, each text once."""
    return list(dict.fromkeys(read_part(reply.text) for reply in recording))
