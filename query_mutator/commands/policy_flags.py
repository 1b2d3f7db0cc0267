"""Flags of the commands that use a trained policy, and the models they name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from query_mutator.cli.console import closing_on_interrupt
from query_mutator.env.task import Task
from query_mutator.rewriter.loading import acting_settings, acting_task
from query_mutator.training.checkpoint import Checkpoint
from query_mutator.training.failure_rate import DEFAULT_MAX_FAILURE_RATE
from query_mutator.training.learner import InferencePolicy
from query_mutator.training.learners import load_policy
from query_mutator.training.policy_file import SavedPolicy, read_policy
from query_mutator.training.system import System, SystemSettings

__all__ = ["Policy", "PolicyFlags", "RunFlags", "max_failure_rate", "open_policy", "system_settings", "take_run"]

LATEST = "runs/latest"


@dataclass(frozen=True, kw_only=True)
class PolicyFlags:
    """Flags of every command that uses a trained policy; by default all settings are those of its training."""

    checkpoint: str = LATEST
    """A run folder (its newest checkpoint), a .pt file, or a .qm file of `qm export-policy`."""
    backend: str | None = None
    """Kind of model server: auto, embedded, ollama, openai, llama or a plugin's; by default that of the training."""
    ollama_url: tuple[str, ...] = ()
    """Address of the Ollama server, or of several that share the calls."""
    openai_url: str | None = None
    """Address of an OpenAI-compatible server."""
    gguf: tuple[str, ...] = ()
    """GGUF file of the model, or two: target, then mutator. llama.cpp runs them, no server is needed."""
    target_model: str | None = None
    """The model that answers."""
    mutator_model: str | None = None
    """The model that carries out rewrites; hf:FOLDER runs one in this process."""
    batch_size: int | None = None
    """Model calls in flight at once."""
    timeout_s: Annotated[float | None, arg(aliases=["--timeout"])] = None
    """Seconds to wait for one reply."""
    wait_for_server_s: Annotated[float | None, arg(aliases=["--wait-for-server"])] = None
    """Seconds to wait for a server that stopped answering; by default as in the training, 0 for no wait."""
    max_reply_mb: float | None = None
    """Longest reply that is read, in MB; a longer one is a failed call."""
    max_retries: int | None = None
    """Retries after transient failures; a timeout is retried once."""
    num_ctx: int | None = None
    """Context length, by default as in the training. Sent to Ollama, set with --gguf; other servers have their own."""
    keep_alive: str | None = None
    """How long an Ollama server keeps a model loaded after a call."""
    cache: Literal["off", "eval", "all"] | None = None
    """Whether replies are cached on disk; eval and all mean the same here."""
    cache_path: str | None = None
    """File of the cache."""
    max_failure_rate: float | None = None
    """Exit with code 3 when the calls of more than this share of the questions failed; by default as in training."""
    device: str | None = None
    """Torch device of the sentence encoder."""

    def of_training(self, settings: SystemSettings) -> SystemSettings:
        """Return the training's settings that stand where no flag is given."""
        return settings


@dataclass(frozen=True, kw_only=True)
class RunFlags(PolicyFlags):
    """Flags of the commands that take the policy as their argument too."""

    run: Positional[str] = ""
    """The policy, as --checkpoint."""

    def __post_init__(self) -> None:
        if self.run:
            take_run(self, self.run)


def take_run(flags: PolicyFlags, run: str) -> None:
    """Make a run that is given as an argument the policy; ValueError when --checkpoint names another."""
    if flags.checkpoint not in (LATEST, run):
        raise ValueError(f"{run} and --checkpoint {flags.checkpoint} are two policies; give one")
    object.__setattr__(flags, "checkpoint", run)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A trained policy with the models it needs, for acting: its task has no gold."""

    saved: SavedPolicy
    system: System
    task: Task
    frozen: InferencePolicy

    @property
    def checkpoint(self) -> Checkpoint:
        """Return the policy's checkpoint."""
        return self.saved.checkpoint


@contextmanager
def open_policy(flags: PolicyFlags) -> Iterator[Policy]:
    """Yield the policy of --checkpoint with the models of its training, or those that flags name."""
    saved = read_policy(flags.checkpoint)
    saved.checkpoint.load_plugins()
    system = System(system_settings(flags, flags.of_training(saved.checkpoint.system)), light=True)
    with system, closing_on_interrupt(system.calls.close):
        task = acting_task(saved, system)
        with closing(system.calls):
            yield Policy(saved=saved, system=system, task=task, frozen=load_policy(saved.checkpoint))


_NOT_OF_SYSTEM = ("checkpoint", "max_failure_rate")


def system_settings(flags: PolicyFlags, base: SystemSettings) -> SystemSettings:
    """Return a checkpoint's system settings with the given flags in place of them."""
    names = {field.name for field in fields(PolicyFlags)} - set(_NOT_OF_SYSTEM)
    given = {name: getattr(flags, name) for name in names if getattr(flags, name) not in (None, ())}
    if isinstance(target := given.get("target_model"), tuple):  # of `qm eval`
        (given["target_model"],) = target
    return acting_settings(base, given)


def max_failure_rate(flags: PolicyFlags, checkpoint: Checkpoint) -> float:
    """Return the flag, by default that of the training."""
    if flags.max_failure_rate is not None:
        return flags.max_failure_rate
    return float(checkpoint.flags.get("max_failure_rate", DEFAULT_MAX_FAILURE_RATE))
