"""`qm serve`: a proxy in front of a model server, whose virtual models answer rewritten questions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from query_mutator.apply import Limits, Rewriter
from query_mutator.bounds import Count, Megabytes, Million, Port, Seconds
from query_mutator.cli.console import note
from query_mutator.commands.policy import RunFlags, open_policy
from query_mutator.errors import UsageError
from query_mutator.learners import Plan, PlanPolicy
from query_mutator.llm.client import is_loopback
from query_mutator.settings import DIRECT

if TYPE_CHECKING:
    from query_mutator.apply.proxy.app import Proxy
    from query_mutator.apply.proxy.upstream import Address
    from query_mutator.llm.client import ModelServer

KEY_VARIABLE = "QM_API_KEY"
UPSTREAM_TIMEOUT_S = 600.0  # of a client's own calls, which may be long
#: Maximum calls to mutator and target for a question, by mode.
MAX_CALLS = {"gate": 3, "full": 12}


@dataclass(frozen=True, kw_only=True)
class ServeFlags(RunFlags):
    """Serve a proxy in front of a model server: MODEL+qm is MODEL with rewriting.

    With several --target-model, each NAME@URL, auto+qm asks them one after another, as the plan decides.
    Without flags nothing is cached on disk, and calls to a server that is down fail, whatever the training did.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "checkpoint", "ollama_url", "host", "port", "mode", "max_calls", "request_deadline_s", "api_key",
    )  # fmt: skip
    #: Calls have the client's context.
    FIXED: ClassVar[Mapping[str, Any]] = {
        "num_ctx": None, "cache": DIRECT.cache, "wait_for_server_s": DIRECT.wait_for_server_s,
    }  # fmt: skip

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 11435
    """Port to listen on; 0 takes a free one."""
    mode: Literal["gate", "full"] = "full"
    """full: as evaluated; gate: only rewrite questions whose answer refuses."""
    max_calls: Count | None = None
    """Maximum model calls for a question; by default 12 in full mode, 3 in gate."""
    request_deadline_s: Seconds = 60.0
    """Seconds after which the best answer so far is sent, or the original question is asked."""
    max_question_tokens: Million = 200
    """Maximum tokens of a rewritten question, estimated from characters; longer ones pass unchanged."""
    max_requests: Million = 1000
    """Maximum open requests; further ones get status 503."""
    max_body_mb: Megabytes = 64.0
    """Maximum size of a request in MB; uploads of models may be larger."""
    drain_s: Seconds = 30.0
    """Seconds for open requests to finish after SIGTERM or Ctrl-C."""
    api_key: str | None = None
    """Key that clients must send as `Authorization: Bearer KEY`, required where --host is not this machine's own;
    QM_API_KEY sets the default."""
    log_traffic: str | None = None
    """File of questions, replies and feedback, for qm plan --from-logs; keeps 30 days and at most 16 MB."""
    delete_traffic: str | None = None
    """Empty this traffic file and exit."""


def serve(flags: ServeFlags) -> None:
    """Serve until SIGTERM or Ctrl-C; requests that are open then may finish."""
    from query_mutator.apply.proxy.feedback import delete_traffic
    from query_mutator.apply.proxy.server import ProxyServer, listen

    if flags.delete_traffic is not None:
        delete_traffic(flags.delete_traffic)
        note(f"{flags.delete_traffic} is empty")
        return
    key = flags.api_key or os.environ.get(KEY_VARIABLE) or None
    if key is None and not is_loopback(flags.host):
        raise UsageError(f"--host {flags.host} can be reached from other machines; give a key with --api-key")
    listening = listen(flags.host, flags.port)
    with listening, open_policy(flags) as rewriter:
        if len(rewriter.models.targets) > 1 and flags.mode == "gate":
            raise UsageError("--mode gate asks one model, and the plan asks several; leave it out")
        proxy = serving(flags, rewriter, key)
        host, port = listening.getsockname()[:2]
        virtual = proxy.names.virtual(rewriter.target_model)
        note(f"served on http://{host}:{port}: {virtual} is rewritten; questions are sent to {proxy.upstream}")
        note(mode_line(flags, rewriter))
        print(f"listening on http://{host}:{port}", flush=True)
        ProxyServer(proxy.application(), listening, proxy.limits).run_until_signal()


def mode_line(flags: ServeFlags, rewriter: Rewriter) -> str:
    """Return what the mode does with a policy, and the models and temperature of its training."""
    policy, calls = rewriter.policy, flags.max_calls or MAX_CALLS[flags.mode]
    if isinstance(policy, PlanPolicy) and policy.plan == Plan():
        return f"mode {flags.mode}: the plan is the original question, so nothing is rewritten"
    who = f"the plan {policy.plan}" if isinstance(policy, PlanPolicy) else f"the {rewriter.saved.flags.algo} policy"
    when = "only if an answer refuses (--mode full: always)" if flags.mode == "gate" else "every question"
    trained, temperature = rewriter.saved.system, f"{rewriter.task.calls.temperature:g} unless a client sets one"
    own = f"models {' and '.join(filter(None, dict.fromkeys((trained.first_model, trained.mutator_model))))}"
    return f"mode {flags.mode}: {who} rewrites {when}, with at most {calls} calls; {own}, temperature {temperature}"


def serving(flags: ServeFlags, rewriter: Rewriter, key: str | None) -> Proxy:
    """Return the proxy of a policy in front of the model server of its target."""
    from query_mutator.apply.proxy.answers import PolicyAnswerer
    from query_mutator.apply.proxy.app import Proxy
    from query_mutator.apply.proxy.chat import Names
    from query_mutator.apply.proxy.feedback import Feedback, TrafficLog
    from query_mutator.apply.proxy.metrics import Metrics
    from query_mutator.apply.proxy.server import Access, ClientLimits
    from query_mutator.apply.proxy.upstream import Upstream

    calls, models, metrics = flags.max_calls or MAX_CALLS[flags.mode], rewriter.models, Metrics()
    addresses = [_address(server, models.target_model) for server in models.calls.servers]
    names = Names(rewriter.target_model if len(models.targets) > 1 else "")
    upstream = Upstream(
        addresses,
        arms={name: _address(models.calls.server_of(name), name) for name in models.targets} if names.first else {},
        timeout_s=flags.timeout_s if "timeout_s" in flags.given else UPSTREAM_TIMEOUT_S,
        max_reply_bytes=round(flags.max_reply_mb * 1e6),
    )
    answerer = PolicyAnswerer(
        rewriter,
        upstream,
        metrics,
        mode=flags.mode,
        limits=Limits(max_calls=max(1, calls - (flags.mode == "gate")), deadline_s=flags.request_deadline_s),
        max_question_tokens=flags.max_question_tokens,
        names=names,
        feedback=Feedback(metrics, None if flags.log_traffic is None else TrafficLog(flags.log_traffic)),
    )
    return Proxy(
        upstream,
        answerer,
        metrics,
        access=Access(host=flags.host, api_key=key),
        limits=ClientLimits(
            body_bytes=round(flags.max_body_mb * 1e6), requests=flags.max_requests, drain_s=flags.drain_s
        ),
    )


def _address(server: ModelServer, model: str) -> Address:
    """Return where a server has a model."""
    from query_mutator.apply.proxy.upstream import Address
    from query_mutator.llm.connection import proxy_of

    url = server.http_url(model).rstrip("/")
    headers, root = server.http_headers(model), server.api_root
    return Address(url=url, root=root, proxy=proxy_of(url), headers=headers, is_own=server.runs_files)
