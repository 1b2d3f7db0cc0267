"""The flags of `qm eval`, of one policy with one model or several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from query_mutator.bounds import Seed
from query_mutator.cli.common import JsonFlags
from query_mutator.cli.outputs import Output, holding
from query_mutator.commands.policy_flags import RunFlags
from query_mutator.lab.sweep.config import EngineFlags, is_sweep
from query_mutator.settings.evaluation import Comparison
from query_mutator.settings.questions import Columns, Reward

__all__ = ["EvalFlags"]


@dataclass(frozen=True, kw_only=True)
class EvalFlags(RunFlags, Comparison, Columns, Reward, JsonFlags, EngineFlags):
    """Compare a trained policy with baselines: the original question, random rewrites, fixed rewrites.

    Answers are scored as in training, or by --reward.

    With several models after --target-model, evaluate each and print a row for each; --engine says where. Rerun the
    command to resume.
    """

    target_model: tuple[str, ...] = ()  # type: ignore[assignment]  # other commands take one
    """The model that answers, or several to compare."""
    out: Annotated[str | None, Output(is_sweep, is_folder=True, resumes=True)] = None
    """Folder of the comparison of several models; by default evaluations/NAME after the policy."""
    local_server_url: str | None = None
    """Address of the model server on each machine that evaluates, as http://127.0.0.1:11434, for --ollama-url."""

    dataset: str | None = None
    """Questions to ask: a file, or the name of a bundled set; by default the held-out ones. Those whose
    text is in the training set are left out; those about its targets have a column of their own."""
    seed: Seed = 1
    """Seed of the random baseline."""
    evaluation: Annotated[str | None, Output(holding(b'{"method":'))] = None
    """File for a JSON row per method and question: steps, answers, which was submitted, calls, tokens, seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        EngineFlags.__post_init__(self)
        if self.local_server_url:
            if self.ollama_url not in ((), (self.local_server_url,)):
                raise ValueError("--ollama-url and --local-server-url both name the servers; give one of them")
            object.__setattr__(self, "ollama_url", (self.local_server_url,))
        if self.evaluation and len(self.target_model) > 1:
            raise ValueError(
                "--evaluation names one file; with several models each has an evaluation.jsonl of its own in --out"
            )
