"""P(right): how likely an answer is right, learned from graded answers and calibrated; never from gold when it is used.

`ConfidenceModel` is fitted on `LoggedAnswer` rows and scores the `Attempt`s at a question: `p_right`, `submit`,
`explain`; its `out_of_fold` has probabilities to learn other things from, `plain_vote` is the rival. It imports
`reading`, `encoder`, `stats`, `files` and the vocabulary.
"""

from query_mutator.confidence.answer_keys import AnswerKind, Attempt, LoggedAnswer, answer_groups, answer_key
from query_mutator.confidence.crossfit import training_table
from query_mutator.confidence.model import ConfidenceModel, Reason, Submission
from query_mutator.confidence.order import greedy_order, places_by_question
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
