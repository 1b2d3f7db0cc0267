"""Bounds of calls where choosing a form asks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from query_mutator import forms
from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.scheduling import run_flow
from query_mutator.env.task import Task
from query_mutator.llm.client import Client
from query_mutator.llm.retry import RetryPolicy
from query_mutator.session.play import Limits, Script, play


@pytest.mark.parametrize("most", [1, 2])
def test_one_call_suffices_for_a_form(tiny_task: Callable[..., Task], tiny_client: Client, most: int) -> None:
    task = tiny_task(forms=forms.select("short_answer"), ask="form")
    steps = [task.actions.index("short_answer"), task.actions.index("submit")]
    engine = EpisodeEngine.open(task, 0, observes=False)
    flow = play(Script(steps), engine, limits=Limits(max_calls=most), asks_when_stopped=True)
    played = run_flow(flow, client=tiny_client, encoder=task.encoder, retry_policy=RetryPolicy())
    assert (played.stopped, engine.episode.calls) == (None, 1)
    assert engine.submitted is not None
    assert engine.submitted.form == "short_answer"
