"""`qm gym serve`: the rewriting of questions as a puzzle gym, over telnet, plain TCP and WebSocket on one port."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import arg

from query_mutator.cli.console import closing_on_interrupt, note
from query_mutator.env.observation import Projection
from query_mutator.env.task import Task
from query_mutator.evaluation.heldout import embed_questions
from query_mutator.gym.server import Game, GymnasiumTextEnv, GymServer, TextEnv
from query_mutator.llm.backends import AUTO
from query_mutator.llm.client import Client
from query_mutator.training.checkpoint import read_checkpoint
from query_mutator.training.dataset import split_dataset
from query_mutator.training.learners import load_policy
from query_mutator.training.system import System, SystemSettings, TaskSettings, make_task
from rl_query_mutator_env import QueryMutationEnv

Hint = Callable[[QueryMutationEnv], str]


@dataclass(frozen=True, kw_only=True)
class GymServeFlags:
    """Serve question rewriting as a puzzle: a client chooses operators, undo or submit by name."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8023
    """Port to listen on; 0 takes a free one."""
    checkpoint: str | None = None
    """Run folder or .pt whose policy gives the hints; without one they name each operator in turn."""
    backend: str = AUTO
    """Model server: auto, embedded, ollama, llama or a plugin's; auto uses Ollama if it answers, else embedded."""
    ollama_url: str | None = None
    """Address of the Ollama server."""
    gguf: tuple[str, ...] = ()
    """GGUF file of the model, or two: target, then mutator. llama.cpp runs them, no server is needed."""
    target_model: str | None = None
    """The model that answers."""
    mutator_model: str | None = None
    """The model that rewrites; hf:FOLDER runs one in this process."""
    encoder: str = "all-MiniLM-L6-v2"
    """Sentence encoder: a folder, a hub name, ollama:NAME, or hash."""
    dataset: str = "python_docs"
    """Questions: python_docs or reference_tables (bundled), or a .jsonl, .csv or .parquet file."""
    operators: str = ""
    """Rewrite operators that clients may choose, as a,b,c; by default all."""
    batch_size: int = 8
    """Clients whose environments run at once."""
    timeout_s: Annotated[float, arg(aliases=["--timeout"])] = 120.0
    """Seconds to wait for one reply of a model."""
    seed: int = 42
    """Seed of the questions for clients that give none."""


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
    names = ("backend", "ollama_url", "gguf", "target_model", "mutator_model", "encoder", "batch_size", "timeout_s")
    settings = SystemSettings(**{name: getattr(flags, name) for name in names})
    task_settings, projection = TaskSettings(dataset=flags.dataset, operators=flags.operators), None
    hint: Hint = in_turn
    if flags.checkpoint:
        task_settings, projection, hint = _trained(flags.checkpoint)
    with System(settings) as system, closing_on_interrupt(system.calls.close):
        note(system.choice.reason)
        train = split_dataset(task_settings).train
        embed_questions(system.encoder, train)
        task = make_task(system, task_settings, train, projection=projection)
        yield rewriting_game(task, system.calls.client, hint=hint)


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
    lines |= {"answer": "(not asked)" if current is None else current.answer}
    lines |= {"done": ", ".join(episode.names) or "-", "actions": ", ".join(env.task.actions)}
    return "\n".join(f"{name}: {' '.join(text.split())}" for name, text in lines.items())


def in_turn(env: QueryMutationEnv) -> str:
    """Return operators and undo alternately, starting with a different operator per question, and submit at the end."""
    assert env.episode is not None
    steps, operators = env.episode.steps, env.task.operators
    if steps >= env.task.max_episode_steps - 1:
        return "submit"
    return "undo" if steps % 2 else operators[(env.episode.index + steps // 2) % len(operators)].name


def _is_right(info: Mapping[str, Any], _total: float) -> bool:
    return bool(info.get("success", 0.0) >= 0.5)


def _trained(checkpoint: str) -> tuple[TaskSettings, Projection, Hint]:
    """Return the task a policy was trained on, its projection of embeddings, and its greedy actions as hints."""
    found = read_checkpoint(checkpoint)
    policy = load_policy(found)

    def greedy(env: QueryMutationEnv) -> str:
        assert env.engine is not None
        action = int(policy.act(env.engine.observe()[None], (), greedy=True).actions[0])
        return env.task.actions[action]

    return found.task, found.projection, greedy
