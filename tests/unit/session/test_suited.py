"""Defaults for a language model: only what no flag says, nothing for the embedded assistant."""

from __future__ import annotations

import pytest

from query_mutator.commands.plan_flags import PlanFlags
from query_mutator.session.suited import SUITED, SUITED_PLAN, suited
from query_mutator.session.task import rewrites
from query_mutator.settings.episode import TaskSettings
from query_mutator.training.config import parse_config


def test_a_language_model_gets_what_suits_it_and_the_embedded_assistant_nothing() -> None:
    config = parse_config([])
    found, [line] = suited(config, embedded=False)
    assert {name: getattr(found, name) for name in SUITED} == SUITED
    assert line.startswith("a language model answers: --operators clean --forms ")
    assert found.given == config.given
    assert suited(config, embedded=True) == (config, [])
    operators, forms = rewrites(found)
    assert [operator.name for operator in operators] == ["clean"]
    assert len(forms) >= 3


@pytest.mark.parametrize(
    ("argv", "left"),
    [
        (["--operators", "spelling"], {"operators"}),
        (["--forms", "all"], {"forms"}),
        (["--ask", "every_step"], {"ask", "max_asks"}),
        (["--ask", "form", "--max-asks", "1", "--deterministic"], {"max_asks", "answer", "budget", "call_price"}),
        (["--answer", "vote", "--budget", "3"], {"answer", "budget"}),
        (["--max-episode-steps", "5"], {"max_episode_steps"}),
        (["--algo", "ppo"], {"algo"}),
        (["--entropy-coef", "0.02"], {"algo"}),
        (["--ask", "form", "--teacher", "search"], {"algo"}),
        (["--teacher", "search"], {"algo"}),
        (["--max-asks", "3"], {"max_asks"}),
        (["--engine", "ray"], {"algo"}),
        (["--num-steps", "16", "--lr", "0.001", "--teacher", "auto", "--deterministic"], set()),
    ],
)
def test_what_a_flag_says_or_excludes_stays(argv: list[str], left: set[str]) -> None:
    config = parse_config(argv)
    found, _ = suited(config, embedded=False)
    assert {name for name, value in SUITED.items() if getattr(found, name) != value} == left
    assert all(getattr(found, name) == getattr(config, name) for name in left)


@pytest.mark.parametrize(
    ("more", "algo", "teacher"),
    [
        ([], "bandit", "auto"),
        (["--deterministic"], "direct", None),
        (["--engine", "ray"], "ppo", None),
        (["--algo", "iqn"], "iqn", None),
        (["--teacher", "clean"], "ppo", "clean"),
    ],
)
def test_with_one_answer_it_starts_from_the_best_plan(more: list[str], algo: str, teacher: str | None) -> None:
    found, _ = suited(parse_config(["--max-asks", "1", "--ask", "form", *more]), embedded=False)
    assert (found.algo, found.teacher) == (algo, teacher)


def test_settings_without_a_field_are_left_without_it() -> None:
    found, [line] = suited(PlanFlags(), embedded=False, values=SUITED_PLAN)
    assert (found.max_asks, found.answer) == (1, "searched")
    assert "--ask " not in line
    everything = TaskSettings(**{name: value for name, value in SUITED.items() if name not in ("algo", "budget")})
    assert suited(everything, embedded=False) == (everything, [])


def test_a_resumed_run_keeps_its_actions() -> None:
    config = parse_config(["--resume", "runs/latest"])
    assert suited(config, embedded=False) == (config, [])
