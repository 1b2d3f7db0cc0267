"""What travels between a client and the server: the action, the observation, the state."""

from __future__ import annotations

from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

__all__ = ["REWRITE", "QueryRewritingAction", "QueryRewritingObservation", "QueryRewritingState"]

REWRITE = "rewrite"  # the action whose text is the client's own wording


class QueryRewritingAction(Action):
    """Choose an action by its name, or give a wording of your own: `QueryRewritingAction(text="...")`."""

    name: str = Field(default=REWRITE, max_length=200, description="One of `action_mask`.")
    text: str = Field(default="", max_length=20_000, description="The new wording, for the action rewrite alone.")


class QueryRewritingObservation(Observation):
    """The episode after a step or reset. `reward` is None after a reset, and where `valid` is False."""

    valid: bool = Field(default=True, description="Whether the step was carried out; if not, `error` says why.")
    error: str = Field(default="", description="The kind of the failed call, as timeout, or action; and what happened.")
    question_id: str = ""
    question: str = Field(default="", description="The original question.")
    text: str = Field(default="", description="The current wording of the question.")
    form: str = Field(default="", description="The form in which the target gets it.")
    answer: str = Field(default="", description="The answer that would be submitted now.")
    success: float | None = Field(default=None, description="At the end: whether the submitted answer is right.")
    action_mask: dict[str, bool] = Field(
        default_factory=dict, description="Every action by name, and whether it is allowed; others have no effect."
    )
    calls: int = Field(default=0, description="Model calls of the episode so far.")


class QueryRewritingState(State):
    """The counts of a session: `episode_id` and `step_count` are of the episode, the others of the session."""

    episode_return: float = Field(default=0.0, description="Sum of the rewards of the episode's valid steps.")
    episodes: int = Field(default=0, description="Episodes begun.")
    steps: int = Field(default=0, description="Steps taken, failed ones included.")
    failed_steps: int = Field(default=0, description="Steps with a call that failed for good.")
    failed_resets: int = 0
    invalid_actions: int = Field(default=0, description="Actions that were refused; no step was taken.")
