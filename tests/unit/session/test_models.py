"""Models are opened as a record, whose resolved settings open the same ones again."""

from __future__ import annotations

import dataclasses

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from query_mutator.errors import UsageError
from query_mutator.llm.backends import BACKENDS
from query_mutator.llm.client import ModelServer
from query_mutator.session.models import ResolvedModels, open_models
from query_mutator.settings.models import ModelSettings
from query_mutator.types import ChatRequest, Completion

RECORDED = ModelSettings(backend="recorded", encoder="hash", cache="off", batch_size=2)


def test_the_record_has_the_choices_and_cannot_be_changed() -> None:
    with open_models(RECORDED) as models:
        assert models.target_model == models.mutator_model == "SmolLM2-135M-Instruct.Q4_1"
        with pytest.raises(dataclasses.FrozenInstanceError):
            models.url = "http://elsewhere"  # type: ignore[misc]


def test_resolved_settings_open_the_same_models() -> None:
    with open_models(dataclasses.replace(RECORDED, use_batching=False)) as models:
        resolved = models.resolved
    assert (resolved.backend, resolved.target_model, resolved.batch_size) == (
        "recorded",
        "SmolLM2-135M-Instruct.Q4_1",
        1,
    )
    with open_models(resolved) as models:
        assert models.resolved == resolved


def test_blas_has_one_thread_while_models_are_open() -> None:
    def threads() -> set[int]:
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    with threadpool_limits(2, user_api="blas"):
        with open_models(RECORDED):
            assert threads() == {1}
        assert threads() == {2}


def test_files_of_models_must_have_their_digests() -> None:
    with pytest.raises(UsageError, match="changed since this policy was trained"):
        open_models(ResolvedModels(backend="recorded", encoder="hash", cache="off", file_digests=("0" * 64,)))


class TwoModels(ModelServer):
    """A backend with a model for each part."""

    title = "two models"

    def default_models(self) -> tuple[str, str]:
        return "large", "small"

    def complete(self, request: ChatRequest) -> Completion:
        return Completion(text=request.model)


def test_a_server_names_the_models_of_a_run_that_names_none() -> None:
    BACKENDS.add("two", TwoModels)
    two = ModelSettings(backend="two", encoder="hash", cache="off", batch_size=2)
    for given, used in (({}, ("large", "small")), ({"target_model": "huge"}, ("huge", "small"))):
        with open_models(dataclasses.replace(two, **given)) as models:
            assert (models.target_model, models.mutator_model) == used


@pytest.mark.parametrize(
    ("backend", "deterministic", "gathers"),
    [("recorded", False, True), ("recorded", True, False), ("two", False, False)],
)
def test_texts_wait_for_others_where_a_file_is_the_model(backend: str, deterministic: bool, gathers: bool) -> None:
    BACKENDS.add("two", TwoModels)
    settings = dataclasses.replace(RECORDED, backend=backend, deterministic=deterministic)
    with open_models(settings) as models:
        assert models.encoder.gathers == gathers
