"""`qm gym serve`: the rewriting of questions as a puzzle gym, over telnet, plain TCP and WebSocket on one port."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from query_mutator.batching.gym.server import Game, GymnasiumTextEnv, GymServer, TextEnv
from query_mutator.bounds import defaults, group_of
from query_mutator.cli.console import note
from query_mutator.env.observation import Projection
from query_mutator.env.task import Task
from query_mutator.evaluation.heldout import embed_questions
from query_mutator.llm.client import Client
from query_mutator.session.checkpoint import read_checkpoint
from query_mutator.session.dataset import split_dataset
from query_mutator.session.loading import load_policy
from query_mutator.session.models import open_models
from query_mutator.session.task import make_task
from query_mutator.session.trust import check_reach
from query_mutator.settings.episode import CallRules, Operators, TaskSettings
from query_mutator.settings.listening import Listening
from query_mutator.settings.models import ModelSettings
from query_mutator.settings.questions import Questions
from query_mutator.types import AS_IS
from rl_query_mutator_env import QueryMutationEnv

Hint = Callable[[QueryMutationEnv], str]


@dataclass(frozen=True, kw_only=True)
@defaults(seed=42, port=8023)
class GymServeFlags(Listening, ModelSettings, Questions, Operators, CallRules):
    """Serve question rewriting as a puzzle: a client chooses operators, forms, undo or submit by name."""

    FIRST: ClassVar[tuple[str, ...]] = (
        "host", "port", "checkpoint", "backend", "ollama_url", "gguf", "target_model", "mutator_model", "encoder",
        "dataset", "operators", "batch_size", "timeout_s", "seed",
    )  # fmt: skip

    checkpoint: str | None = None
    """Run folder or .pt whose policy gives the hints; without one they name each operator in turn."""


def gym_serve(flags: GymServeFlags) -> None:
    """Serve until interrupted."""
    with (
        serving(flags) as game,
        GymServer([game], host=flags.host, port=flags.port, seed=flags.seed, max_workers=flags.batch_size) as server,
    ):
        print(f"listening on {flags.host}:{server.port}", flush=True)
        server.wait()


@contextmanager
def serving(flags: GymServeFlags) -> Iterator[Game]:
    """Yield the environment as a game, with its models running."""
    task_settings, projection = group_of(TaskSettings, flags, seed=0, validation_fold="none"), None
    hint: Hint = in_turn
    if flags.checkpoint:
        task_settings, projection, hint = _trained(flags.checkpoint, dataset=flags.dataset)
    with open_models(flags) as models:
        note(models.choice.reason)
        train = split_dataset(task_settings).train
        embed_questions(models.encoder, train)
        task = make_task(models, task_settings, train, projection=projection)
        yield rewriting_game(task, models.calls.client, hint=hint)


def rewriting_game(task: Task, client: Client, *, hint: Hint | None = None) -> Game:
    """Return the game in which a client rewrites one of the task's questions and submits its answer."""

    def make() -> TextEnv:
        return GymnasiumTextEnv(
            QueryMutationEnv(task, client=client),
            task.actions,
            text=lambda env, info: describe(env),
            hint=hint or in_turn,
            solved=_is_right,
        )

    return Game("Rewrite", "rewrite a question until its answer is right", make)


def describe(env: QueryMutationEnv) -> str:
    """Return question, current rewrite, its answer, and the actions taken and available, as lines."""
    assert env.episode is not None
    episode, current = env.episode, env.episode.current
    lines = {"question": episode.original, "rewrite": episode.text}
    if episode.form != AS_IS:
        lines["form"] = episode.form
    lines |= {"answer": "(not asked)" if current is None else current.answer}
    lines |= {"done": ", ".join(episode.names) or "-", "actions": ", ".join(env.task.actions)}
    return "\n".join(f"{name}: {' '.join(text.split())}" for name, text in lines.items())


def in_turn(env: QueryMutationEnv) -> str:
    """Return rewrites and undo alternately, starting with a different one for each question, and submit at the end."""
    assert env.episode is not None
    steps, rewrites = env.episode.steps, env.task.actions[: env.task.num_rewrites]
    if steps >= env.task.rules.max_episode_steps - 1:
        return "submit"
    return "undo" if steps % 2 else rewrites[(env.episode.index + steps // 2) % len(rewrites)]


def _is_right(info: Mapping[str, Any], _total: float) -> bool:
    return bool(info.get("success", 0.0) >= 0.5)


def _trained(checkpoint: str, *, dataset: str) -> tuple[TaskSettings, Projection, Hint]:
    """Return the task a policy was trained on, its projection of embeddings, and its greedy actions as hints."""
    found = read_checkpoint(checkpoint)
    check_reach(asdict(found.task), source=found.path, named={"dataset": dataset})
    policy = load_policy(found)

    def greedy(env: QueryMutationEnv) -> str:
        assert env.engine is not None
        action = int(policy.act(env.engine.observe()[None], (), greedy=True).actions[0])
        return env.task.actions[action]

    return found.task, found.projection, greedy
