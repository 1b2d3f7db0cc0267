"""Score the answers of a run again, with other reward parts or another judge: the target is not asked.

Gold                      the questions by id, with what is accepted
open_steps, open_outcomes the rows of transcripts.jsonl and of evaluation.jsonl with the answers in them
rate                      a Reward, or an ErrorInfo, for each of their answers
step_rows, outcome_rows   the rows with the new scores
"""

from query_mutator.evaluation.rescoring.answers import Answered, Gold, Ratings, Scoring, check_ratings, rate
from query_mutator.evaluation.rescoring.changes import changes, changes_text
from query_mutator.evaluation.rescoring.outcomes import open_outcomes, outcome_rows
from query_mutator.evaluation.rescoring.steps import open_steps, step_rows

__all__ = [
    "Answered",
    "Gold",
    "Ratings",
    "Scoring",
    "changes",
    "changes_text",
    "check_ratings",
    "open_outcomes",
    "open_steps",
    "outcome_rows",
    "rate",
    "step_rows",
]  # fmt: skip
