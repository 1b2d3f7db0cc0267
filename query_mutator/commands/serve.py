"""`qm serve`: a proxy in front of a model server, whose virtual models answer rewritten questions."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from query_mutator.apply import Limits, Rewriter
from query_mutator.bounds import Cosine, Count, CountOrNone, Megabytes, Million, Port, Seconds
from query_mutator.cli.console import note
from query_mutator.commands.policy_flags import RunFlags, open_policy
from query_mutator.errors import UsageError
from query_mutator.learners.plan import Plan
from query_mutator.llm.address import is_loopback
from query_mutator.llm.openai import token_field
from query_mutator.session.models import ResolvedModels
from query_mutator.session.policy_file import SavedPolicy
from query_mutator.settings.calls import DIRECT

if TYPE_CHECKING:
    from query_mutator.apply.proxy.app import Proxy

KEY_VARIABLE = "QM_API_KEY"
UPSTREAM_TIMEOUT_S = 600.0  # of a client's own calls, which may be long
#: Maximum calls to mutator and target for a question, by mode.
MAX_CALLS = {"blind": 9, "gate": 3, "full": 12}
#: An answer may have so many times the tokens of an answer in training, which was only to be judged.
ANSWER_LENGTHS = 4


@dataclass(frozen=True, kw_only=True)
class ServeFlags(RunFlags):
    """Answer rewritten questions behind the address of a model server: MODEL+qm is MODEL with rewriting.

    Without a flag nothing is cached on disk, and a server that is down is not waited for, whatever the training did.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "run", "checkpoint", "ollama_url", "host", "port", "mode", "max_calls", "request_deadline_s", "api_key",
    )  # fmt: skip

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 11435
    """Port to listen on; 0 takes a free one."""
    mode: Literal["blind", "gate", "full"] = "gate"
    """blind: rewrite, then ask once; gate: rewrite only what is refused; full: as the policy was trained."""
    max_calls: Count | None = None
    """Maximum model calls for a question; by default 9 in blind mode, 3 in gate, 12 in full."""
    request_deadline_s: Seconds = 60.0
    """Seconds after which the best answer so far is sent, or the original question asked."""
    gate_not_sure: bool = False
    """Gate mode: also rewrite what is answered with "I'm not sure"."""
    min_meaning: Cosine = 0.1
    """Lowest cosine of a rewrite with its question; a rewrite below it is not asked."""
    max_tokens: CountOrNone | None = None
    """Most tokens of an answer of MODEL+qm where the client sets no limit; by default four times the
    training's --target-max-tokens, 0 for none."""
    max_question_tokens: Million = 200
    """Longer questions pass untouched; estimated from characters."""
    max_requests: Million = 1000
    """Most requests at once; others get status 503."""
    max_body_mb: Megabytes = 64.0
    """Longest request, in MB; uploads of models may be longer."""
    drain_s: Seconds = 30.0
    """Seconds for open requests to finish after SIGTERM or Ctrl-C."""
    api_key: str | None = None
    """Key that clients must send as `Authorization: Bearer KEY`, required where --host is not this machine's own;
    QM_API_KEY sets the default."""

    def of_training(self, settings: ResolvedModels) -> ResolvedModels:
        """Return the training's settings without its context (calls have the client's), and as of a program."""
        return replace(settings, num_ctx=None, cache=DIRECT.cache, wait_for_server_s=DIRECT.wait_for_server_s)


def serve(flags: ServeFlags) -> None:
    """Serve until SIGTERM or Ctrl-C; requests that are open then may finish."""
    from query_mutator.apply.proxy.server import ProxyServer, listen, run_frozen

    key = flags.api_key or os.environ.get(KEY_VARIABLE) or None
    if key is None and not is_loopback(flags.host):
        raise UsageError(f"--host {flags.host} can be reached from other machines; give a key with --api-key")
    listening = listen(flags.host, flags.port)
    with listening, open_policy(flags) as rewriter:
        proxy = serving(flags, rewriter, key)
        host, port = listening.getsockname()[:2]
        note(f"{rewriter.models.url} is served on http://{host}:{port}; {rewriter.target_model}+qm is rewritten")
        note(mode_line(flags, rewriter.saved, blind="blind" in rewriter.modes))
        note(limit_line(flags, rewriter))
        print(f"listening on http://{host}:{port}", flush=True)
        run_frozen(ProxyServer(proxy.application(), listening, proxy.limits))


def mode_line(flags: ServeFlags, saved: SavedPolicy, *, blind: bool) -> str:
    """Return what the mode does with a policy; `blind` says whether that rewrites without an answer."""
    plan, calls = saved.flags.get("plan"), flags.max_calls or MAX_CALLS[flags.mode]
    if plan == str(Plan()):
        return f"mode {flags.mode}: the plan is the original question, so nothing is rewritten"
    who = f"the plan {plan}" if plan else f"the {saved.algo} policy"
    if flags.mode == "gate":
        answers = "refuses or is not sure" if flags.gate_not_sure else "refuses"
        return (
            f"mode gate: a question is asked as it is, and only if the answer {answers}, {who} rewrites it, with at "
            f"most {calls} calls; a model that never does so gets no rewrite. Every question is rewritten with --mode "
            f"{'blind' if blind else 'full'}"
        )
    how = "then asked once" if flags.mode == "blind" else "asked whenever it decides to"
    return f"mode {flags.mode}: every question is rewritten by {who} and {how}, with at most {calls} calls"


def max_tokens(flags: ServeFlags, rewriter: Rewriter) -> int:
    """Return the limit on an answer's tokens where a client sets none; 0 for none."""
    return ANSWER_LENGTHS * rewriter.task.calls.target_max_tokens if flags.max_tokens is None else flags.max_tokens


def limit_line(flags: ServeFlags, rewriter: Rewriter) -> str:
    """Return how long answers are."""
    limit, trained = max_tokens(flags, rewriter), rewriter.task.calls.target_max_tokens
    if not limit:
        return "answers: as long as the model writes, where a client sets no limit"
    why = f"{ANSWER_LENGTHS} x the {trained} of the training; " if flags.max_tokens is None else ""
    return f"answers: at most {limit} tokens ({why}--max-tokens), where a client of +qm sets no limit"


def serving(flags: ServeFlags, rewriter: Rewriter, key: str | None) -> Proxy:
    """Return the proxy of a policy in front of the model server of its target."""
    from query_mutator.apply.proxy.answers import Episodes, PolicyAnswerer, Rules
    from query_mutator.apply.proxy.app import Proxy
    from query_mutator.apply.proxy.metrics import Metrics
    from query_mutator.apply.proxy.server import Access, ClientLimits
    from query_mutator.apply.proxy.upstream import Address, Upstream

    if flags.mode not in ("gate", *rewriter.modes):
        raise UsageError(
            "--mode blind needs a policy that asks once: --ask form --max-asks 1, or a plan with one answer"
        )
    calls = flags.max_calls or MAX_CALLS[flags.mode]
    rules = Rules(
        mode=flags.mode,
        gates_not_sure=flags.gate_not_sure,
        max_question_tokens=flags.max_question_tokens,
        max_tokens=max_tokens(flags, rewriter),
        token_field=token_field(rewriter.models.calls.servers[0].http_url(rewriter.target_model)),
    )
    limits = Limits(max_calls=max(1, calls - (flags.mode == "gate")), deadline_s=flags.request_deadline_s)
    metrics = Metrics()
    episodes = Episodes(rewriter, metrics, limits=limits, lowest_meaning=flags.min_meaning)
    model = rewriter.target_model
    addresses = [
        Address(
            url=server.http_url(model).rstrip("/").removesuffix("/v1"),  # what clients ask for begins with it
            headers=server.http_headers(model),
            is_own=server.runs_files,
        )
        for server in rewriter.models.calls.servers
    ]
    upstream = Upstream(
        addresses,
        timeout_s=flags.timeout_s if "timeout_s" in flags.given else UPSTREAM_TIMEOUT_S,
        max_reply_bytes=round(flags.max_reply_mb * 1e6),
    )
    return Proxy(
        upstream,
        PolicyAnswerer(upstream, episodes, metrics, rules),
        metrics,
        access=Access(host=flags.host, api_key=key),
        limits=ClientLimits(
            body_bytes=round(flags.max_body_mb * 1e6), requests=flags.max_requests, drain_s=flags.drain_s
        ),
    )
