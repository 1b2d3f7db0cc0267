"""What travels between an OpenEnv client and the server: the action, the observation, the state."""

from __future__ import annotations

from openenv.core.env_server.types import Action, Observation, State
from pydantic import BaseModel, Field

from query_mutator.adapters.openenv.shared import REWRITE

__all__ = ["Answer", "CallError", "QueryRewritingAction", "QueryRewritingObservation", "QueryRewritingState"]

MAX_TEXT_CHARS = 20_000
MAX_NAME_CHARS = 200


class QueryRewritingAction(Action):
    """Choose an action by its name, or give a wording of your own: `QueryRewritingAction(text="...")`."""

    name: str = Field(
        default=REWRITE,
        max_length=MAX_NAME_CHARS,
        description="An operator, a form, ask, undo or submit, as `action_mask` lists them; or rewrite, with a text.",
    )
    text: str = Field(default="", max_length=MAX_TEXT_CHARS, description="The new wording, for the action rewrite.")


class CallError(BaseModel):
    """Why a step or reset failed."""

    kind: str = Field(description="That of the failed model call, as timeout or busy; action for an invalid action.")
    message: str


class Answer(BaseModel):
    """A wording that was asked, in its form, and the answer to it."""

    text: str
    form: str
    answer: str


class QueryRewritingObservation(Observation):
    """The episode after a step or reset. `reward` is None after a reset, and where `valid` is False."""

    valid: bool = Field(default=True, description="Whether the step was carried out; if not, `error` says why.")
    error: CallError | None = None
    question_id: str = ""
    question: str = Field(default="", description="The original question.")
    text: str = Field(default="", description="The current wording of the question.")
    form: str = Field(default="", description="The form in which the target would get it.")
    answers: list[Answer] = Field(default_factory=list, description="All that was asked in this episode, in order.")
    submitted: int | None = Field(default=None, description="Which of `answers` would be submitted now.")
    success: float | None = Field(default=None, description="At the end: whether the submitted answer is right.")
    action_mask: dict[str, bool] = Field(
        default_factory=dict, description="Every action by name, and whether it is allowed; others have no effect."
    )
    guard: str | None = Field(default=None, description="The check that rejected the rewrite of this step, if one did.")
    calls: int = Field(default=0, description="Model calls of the episode so far.")
    steps_left: int = 0


class QueryRewritingState(State):
    """The counts of a session: `episode_id` and `step_count` are of the episode, the others of the session."""

    question_id: str = ""
    episode_return: float = Field(default=0.0, description="Sum of the rewards of the episode's valid steps.")
    episodes: int = Field(default=0, description="Episodes begun.")
    steps: int = Field(default=0, description="Steps taken, failed ones included.")
    failed_steps: int = Field(default=0, description="Steps with a call that failed for good.")
    failed_resets: int = 0
    invalid_actions: int = Field(default=0, description="Actions that were refused; no step was taken.")
    calls: int = Field(default=0, description="Calls made, retries included.")
    failed_calls: dict[str, int] = Field(
        default_factory=dict, description="Calls that failed, by kind; those that a retry made good are included."
    )
