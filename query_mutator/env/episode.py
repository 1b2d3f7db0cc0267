"""One episode: its rules, the attempts at a question, which of them would be submitted, and what the policy observes.

Episodes are saved in checkpoints as plain types and arrays, so that a run resumes in the middle of them.

The observation is one float32 vector, built from texts and the models' replies, never from gold answers.

K projected embedding dimensions, A operators
slice        size  content
question     K     embedding of the current question, projected and whitened, times 0.4
answer       K     embedding of the target's answer to it, likewise
similarity   3     cosines: original question ~ answer, current question ~ answer, the latter of the best answer so
                   far; each minus 0.5 and times 5, so that they vary as much as the rest
drift        1     1 - cosine of original and current question, times 5
verdicts     4     the answer is a refusal, the answer is "not sure"; the same two for the first answer
words        4     share of unknown words, log length, sentences, question marks
progress     2     share of the episode's steps used, current question is the original
used         A     operators used in this episode
closed       A+2   1 for masked actions: operators tried on the current question, undo at the original

With `ask="form"` the slices of the answer are 0 while the current question was not asked, `closed` has one more
column for the action *ask*, and three slices are added:
slice        size  content
asked        3     the current question was asked, any question was asked, questions asked as a share of the most
best         3     the best answer so far is a refusal, is "not sure", its cosine with the original question as above
price        1     price of a call, times 50
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from query_mutator.operators import english_words
from query_mutator.reading import is_not_sure, is_refusal
from query_mutator.registry import check_known
from query_mutator.rewards import cosine
from query_mutator.settings import Episode as EpisodeSettings
from query_mutator.types import AS_IS, CONTROLS, SUBMIT, UNDO, AnswerRule, AskRule, ErrorInfo, FloatArray, Reward

#: A wording, and the form in which the target gets it.
Asked = tuple[str, str]

#: An operator's number, the text it is applied to, and the form in which that is answered: some use the answer.
Wording = tuple[int, str, str | None]


@dataclass(frozen=True, kw_only=True)
class EpisodeRules(EpisodeSettings):
    """Rules of an episode: actions, prices, and when it ends."""

    def __post_init__(self) -> None:
        check_known("ask", self.ask, get_args(AskRule))
        object.__setattr__(self, "call_price", tuple(self.call_price))  # a file has a list
        super().__post_init__()

    @property
    def policy_asks(self) -> bool:
        """Return whether asking is an action; else the original question and every rewrite are asked at once."""
        return self.ask == "form"

    @property
    def controls(self) -> tuple[str, ...]:
        """Return the actions that are not operators or forms, which they follow."""
        return CONTROLS if self.policy_asks else (UNDO, SUBMIT)

    def ends(self, action: str, *, steps: int) -> bool:
        """Return whether an action is the last one of an episode, of which it is number `steps`."""
        return action == SUBMIT or steps >= self.max_episode_steps

    def max_calls(self, *, asked: int) -> int:
        """Return the maximum calls of one episode with `asked` operators that a model carries out.

        A step makes one call, or two where rewrites are asked at once; an answer comes before or after the steps.
        """
        steps = self.max_episode_steps
        answers = min(steps + (not self.policy_asks), self.max_asks or steps + 1)
        return min(answers + steps * (asked > 0), 1 + steps * (1 + (not self.policy_asks)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A question text in a form, the target's answer to it, and its score; vectors are [D]."""

    text: str
    form: str = AS_IS
    answer: str
    thought: str = ""
    logprob: float | None = None  # mean log probability of the answer's tokens; None where it was not reported
    cut: bool | None = None  # ended at the token limit; None where it is not known
    text_vector: FloatArray
    answer_vector: FloatArray
    fit: float  # cosine of this text and the answer to it
    closeness: float  # cosine of the original question and the answer
    reward: Reward
    price: float = 1.0  # of the call

    @property
    def asked(self) -> Asked:
        """Return what was asked."""
        return self.text, self.form

    @property
    def verdicts(self) -> tuple[bool, bool]:
        """Return whether the answer is a refusal, and whether it is "not sure"."""
        return is_refusal(self.answer), is_not_sure(self.answer)

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Return the sort key of `best`, without gold: an answer beats "not sure" beats a refusal, then fit."""
        refused, not_sure = self.verdicts
        return not refused, not not_sure, self.fit

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Attempt:
        """Return the attempt that `asdict` saved; its arrays may be tensors."""
        vectors = {name: np.array(state[name]) for name in ("text_vector", "answer_vector")}
        return cls(**{**state, **vectors, "reward": Reward(**state["reward"])})


def why_submitted(
    attempts: Sequence[Attempt], chosen: Attempt, rule: AnswerRule, *, p_right: Sequence[float] = ()
) -> str:
    """Return the rule that chose among the attempts of an episode, and the numbers it compared."""
    count = f"{len(attempts)} answers"
    if p_right:
        place = f"{attempts.index(chosen) + 1} of {count}" if len(attempts) > 1 else "the only answer"
        return f"{place}: P(right) {', '.join(f'{p:.2f}' for p in p_right)}"
    if len(attempts) == 1:
        return "the only answer"
    if rule == "vote":
        return f"the most frequent of {count}"
    return f"best: fit to its wording {chosen.fit:.2f}, of {count}"


@dataclass(slots=True, kw_only=True)
class Episode:
    """The state since the question was drawn."""

    index: int  # of the question in the task
    original: str
    text: str  # the current wording of the question
    form: str = AS_IS  # in which the target would get it
    vectors: dict[str, FloatArray]  # every text of this episode, [D]
    used: list[bool]  # operators, and which form is the current one
    call_price: float = 0.0
    known: dict[Asked, Attempt] = field(default_factory=dict)  # all that was asked, which is not asked again
    best: Attempt | None = None  # None before the first answer
    p_right: tuple[float, ...] = ()  # of all that is known, by the rule `learned`
    tried: set[tuple[str, int]] = field(default_factory=set)  # texts and the actions taken on them
    steps: int = 0
    calls: int = 0
    total_reward: float = 0.0
    ended: bool = False  # terminated or truncated
    names: list[str] = field(default_factory=list)  # actions taken

    @property
    def first(self) -> Attempt | None:
        """Return the answer to the original question as it is, None if it was not asked."""
        return self.known.get((self.original, AS_IS))

    @property
    def current(self) -> Attempt | None:
        """Return the answer to the current wording in the current form, None if it was not asked."""
        return self.known.get(self.asked)

    @property
    def asked(self) -> Asked:
        """Return the current wording and form."""
        return self.text, self.form

    @property
    def answer(self) -> str | None:
        """Return the target's answer to the current wording, None if it was not asked."""
        return None if self.current is None else self.current.answer

    @property
    def assurance(self) -> float:
        """Return how good the best answer seems: its P(right) by the rule `learned`, else its fit; 0 without one."""
        return max(self.p_right, default=0.0 if self.best is None else self.best.fit)

    def describe(self) -> str:
        """Return question, actions taken, current wording and its answer, one per line."""
        actions = " > ".join(self.names) or "-"
        answer = "(not asked)" if self.current is None else self.current.answer
        return f"{self.original}\n  {actions}\n{self.text}\n  {answer}"

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Episode:
        """Return the episode that `asdict` saved; its arrays may be tensors."""
        known = {asked: Attempt.from_state(attempt) for asked, attempt in state["known"].items()}
        vectors = {text: np.array(vector) for text, vector in state["vectors"].items()}
        best = state["best"] and known[state["best"]["text"], state["best"]["form"]]
        return cls(**copy.deepcopy(dict(state)) | {"vectors": vectors, "known": known, "best": best})


class Rewriting(NamedTuple):
    """The wording after an operator: its rewrite, or the wording before where a `guard` rejected that."""

    text: str
    guard: str | None = None


@dataclass(frozen=True, slots=True)
class QuestionMemory:
    """Results of the calls and local tests on one question; an ErrorInfo where a call failed for good."""

    rewrites: dict[Wording, Rewriting | ErrorInfo] = field(default_factory=dict)
    attempts: dict[Asked, Attempt | ErrorInfo] = field(default_factory=dict)
    changes: dict[Wording, bool] = field(default_factory=dict)  # whether the operator may change the text
    #: By rule and what is known: the place of the answer that is submitted, and the P(right) of all.
    chosen: dict[tuple[str | Asked, ...], tuple[int, tuple[float, ...]]] = field(default_factory=dict)


#: Embeddings say less about the value of an answer than the cosines, which vary a tenth as much.
# --- the observation -------------------------------------------------------------------------------------------------

_EMBEDDING_SCALE, _COSINE_SCALE, PRICE_SCALE = 0.4, 5.0, 50.0

CACHED_TEXTS = 4096  # word counts: the same questions return in many episodes
READ_CHARS = 10_000  # of a question: a mutator may write millions

_WORD = re.compile(r"[a-z][a-z']*")
_SCALARS = (("similarity", 3), ("drift", 1), ("verdicts", 4), ("words", 4), ("progress", 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear map of embeddings [D] to K whitened principal components."""

    mean: FloatArray  # [D]
    components: FloatArray  # [D, K], each column scaled so that projected data have unit variance

    @classmethod
    def fit(cls, vectors: FloatArray, *, dims: int) -> Projection:
        """Return the whitening PCA of `vectors` [n, D] onto at most `dims` components (signs fixed, so repeatable)."""
        mean: NDArray[np.float64] = vectors.mean(axis=0, dtype=np.float64)
        _, scale, axes = np.linalg.svd(vectors - mean, full_matrices=False)
        kept = min(dims, int((scale > 1e-6 * scale[0]).sum()))
        axes = axes[:kept]
        signs = np.sign(axes[np.arange(kept), np.abs(axes).argmax(axis=1)])
        spread = scale[:kept] / math.sqrt(max(1, len(vectors) - 1))
        components = np.zeros((vectors.shape[1], dims))
        components[:, :kept] = (axes * (signs / spread)[:, None]).T
        return cls(mean=mean.astype(np.float32), components=components.astype(np.float32))

    @property
    def dims(self) -> int:
        """Return K."""
        return int(self.components.shape[1])

    def __call__(self, vector: FloatArray) -> FloatArray:
        """Return the K components of one embedding [D]."""
        return np.asarray((vector - self.mean) @ self.components, dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class Observer:
    """Builds observations; all it has is frozen for a run."""

    projection: Projection
    num_operators: int  # A, forms included
    rules: EpisodeRules

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Return the slices by name, in order and without a gap."""
        dims, actions, asks = self.projection.dims, self.num_operators, self.rules.policy_asks
        per_action = (("used", actions), ("closed", actions + 2 + asks))
        of_asking = (("asked", 3), ("best", 3), ("price", 1)) if asks else ()
        slices: dict[str, slice] = {}
        start = 0
        for name, size in (("question", dims), ("answer", dims), *_SCALARS, *per_action, *of_asking):
            slices[name] = slice(start, start + size)
            start += size
        return slices

    @cached_property
    def size(self) -> int:
        """Return O."""
        return int(max(piece.stop for piece in self.slices.values()))

    def __call__(self, episode: Episode, action_mask: Sequence[bool]) -> FloatArray:
        """Return the observation [O]; the mask [A + 2 or 3] is True where allowed, ask, undo and submit included."""
        obs, put = np.zeros(self.size, dtype=np.float32), self.slices
        answer, first, best = episode.current, episode.first, episode.best
        vector, most_steps = episode.vectors[episode.text], self.rules.max_episode_steps
        obs[put["question"]] = _EMBEDDING_SCALE * self.projection(vector)
        similarity, verdict = (0.0, 0.0), (False, False)
        if answer is not None:
            obs[put["answer"]] = _EMBEDDING_SCALE * self.projection(answer.answer_vector)
            similarity, verdict = (centered(answer.closeness), centered(answer.fit)), answer.verdicts
        assured = 0.0 if best is None else centered(episode.assurance)
        drift = _COSINE_SCALE * (1.0 - cosine(episode.vectors[episode.original], vector))
        first_verdicts = (False, False) if first is None else first.verdicts
        words = _words_in(episode.text[:READ_CHARS])
        progress = (episode.steps / most_steps, episode.text == episode.original)
        # In the order of `_SCALARS`, whose columns are adjacent.
        scalars = slice(put["similarity"].start, put["progress"].stop)
        obs[scalars] = (*similarity, assured, drift, *verdict, *first_verdicts, *words, *progress)
        obs[put["used"].start : put["closed"].stop] = [*episode.used, *(not allowed for allowed in action_mask)]
        if self.rules.policy_asks:
            ask_fraction = len(episode.known) / (self.rules.max_asks or most_steps)
            obs[put["asked"]] = (answer is not None, best is not None, ask_fraction)
            if best is not None:
                obs[put["best"]] = (*best.verdicts, centered(best.closeness))
            obs[put["price"]] = PRICE_SCALE * episode.call_price
        return obs


@lru_cache(maxsize=CACHED_TEXTS)
def _words_in(text: str) -> tuple[float, float, float, float]:
    words, known = _WORD.findall(text.lower()), english_words()
    unknown = sum(word not in known and word.rstrip("'s") not in known for word in words)
    sentences = len([part for part in re.split(r"[.!?]+", text) if part.strip()])
    return (
        4.0 * unknown / max(1, len(words)),
        math.log1p(len(words)) / 2,
        min(sentences, 6) / 3,
        text.count("?") / 2,
    )


def centered(cosine: float) -> float:
    """Return a cosine as observations hold it."""
    return _COSINE_SCALE * (cosine - 0.5)
