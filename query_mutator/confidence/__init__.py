"""P(right): how likely an answer is right, learned from graded answers and calibrated; in use it sees no gold.

`ConfidenceModel` is fitted on `LoggedAnswer` rows and scores the `Attempt`s at a question: `p_right`, `submit`,
`explain`; its `out_of_fold` has probabilities for further fits. The baseline is `plain_vote`.
"""

from query_mutator.confidence.answer_keys import AnswerKind, Attempt, LoggedAnswer, answer_groups, answer_key
from query_mutator.confidence.crossfit import greedy_order, places_by_question, training_table
from query_mutator.confidence.model import ConfidenceModel, Reason, Submission
from query_mutator.confidence.submission import combined, plain_vote, submissions, vote

__all__ = [
    "AnswerKind",
    "Attempt",
    "ConfidenceModel",
    "LoggedAnswer",
    "Reason",
    "Submission",
    "answer_groups",
    "answer_key",
    "combined",
    "greedy_order",
    "places_by_question",
    "plain_vote",
    "submissions",
    "training_table",
    "vote",
]
