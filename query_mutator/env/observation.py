"""The policy's observation: one float32 vector, built from texts and the models' replies, never from gold answers.

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

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from query_mutator.env.episode import Episode, EpisodeRules
from query_mutator.operators import english_words
from query_mutator.rewards import cosine
from query_mutator.types import FloatArray

#: Embeddings say less about the value of an answer than the cosines, which vary a tenth as much.
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
