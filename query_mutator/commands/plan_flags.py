"""The flags of `qm plan`, and those of a search that it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt, Le

from query_mutator.bounds import Count, defaults
from query_mutator.cli.common import JsonFlags
from query_mutator.errors import UsageError
from query_mutator.evaluation.plan_search import check_calls
from query_mutator.files import read_checked_json
from query_mutator.files.run_dir import SUMMARY, check_name
from query_mutator.llm.flags import ServerAddressFlags
from query_mutator.session.trust import check_plugins, check_reach
from query_mutator.settings.episode import CallRules, Operators
from query_mutator.settings.evaluation import CallBudget, FailureRate
from query_mutator.settings.models import ModelSettings, Sampling
from query_mutator.settings.output import DryRun, NamedRun, Resume
from query_mutator.settings.questions import Questions, Reward

__all__ = ["ALGO", "PlanFlags"]

ALGO = "plan"


@dataclass(frozen=True, kw_only=True)
@defaults(name=ALGO, max_asks=1)
class PlanFlags(
    NamedRun,
    DryRun,
    Resume,
    Questions,
    Operators,
    CallRules,
    Reward,
    ServerAddressFlags,
    ModelSettings,
    Sampling,
    FailureRate,
    CallBudget,
    JsonFlags,
):
    """Find the best plan: operators in a fixed order, where to ask, and which answer to submit.

    Reads training questions only; `qm eval` compares the saved plan with the baselines on held-out questions.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "minutes", "max_calls", "answer", "budget", "from_logs", "dataset", "operators", "ollama_url", "gguf",
        "target_model", "target_max_tokens", "batch_size", "seed", "save_dir", "resume", "dry_run", "json",
    )  # fmt: skip
    IN_FILE: ClassVar[tuple[str, ...]] = (
        "adaptive", "allow_mixed", "call_price", "deadline_s", "deterministic", "device", "domain", "early_stop",
        "encoder_max_tokens", "judge_form", "keep_alive", "max_reply_mb", "mutator_max_tokens", "skip_unchanged",
    )  # fmt: skip

    minutes: Annotated[float, Gt(0), Le(10_000)] = 5.0
    """Time without --max-calls, loading included; recorded replies get 20,000 calls instead."""
    max_calls: Count | None = None
    """Maximum model calls of the search; with few, a random sample of the questions is scored."""
    answer: Literal["searched", "learned"] = "searched"
    """Which of several answers is submitted: by the best rule found (searched), or the one that is most likely right
    (learned), asking in form after form until one is likely enough."""
    from_logs: str | None = None
    """Learn from graded replies in this file, without a call; see docs/how-to/learn-from-logs.md."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_calls is not None:
            check_calls(self.max_calls)
        check_name(self.name or ALGO)
        if self.from_logs is not None and self.resume is not None:
            raise ValueError("--from-logs makes no call, so there is nothing to --resume; leave one of them out")

    @staticmethod
    def resumed_base(resumed: Path, named: PlanFlags) -> Mapping[str, Any]:
        """Return the flags of the search in a run folder; UsageError for another folder, and for a search that is done.

        `named` are the flags of the command alone: other servers, files and plugins must be those of runs of this user.
        """
        path = resumed / "config.json"
        config = read_checked_json(path) if path.is_file() else {}
        base = dict(config.get("flags", {}))
        if base.pop("algo", None) != ALGO:
            raise UsageError(f"--resume {resumed}: not a run of qm plan; give its run folder")
        if (resumed / SUMMARY).exists():
            raise UsageError(f"--resume {resumed}: its search is done; start another with qm plan")
        check_reach({name: value for name, value in base.items() if name not in named.given}, source=path)
        check_plugins({} if "plugin" in named.given else config["plugins"], source=path)
        if "minutes" in named.given:  # a new bound on the calls
            base.pop("max_calls", None)
        return base
