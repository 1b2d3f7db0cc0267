"""Question sets: the bundled ones, the readers of files, and the split.

`load_questions` reads .jsonl, .json, .csv and .parquet, also in known layouts (SQuAD, TriviaQA, GSM8K, XSTest);
`load_question_set` returns in addition the requests that should be refused, apart from the questions. The sets in
`BUNDLED` and `guard_questions` come with the product; `split_questions` holds questions out by a hash of their target,
and a fold of the others, so that adding rows moves no other row.
"""

from query_mutator.data.loaders import BUNDLED, QuestionSet, guard_questions, load_question_set, load_questions
from query_mutator.data.split import Split, split_questions

__all__ = [
    "BUNDLED", "QuestionSet", "Split", "guard_questions", "load_question_set", "load_questions",
    "split_questions",
]  # fmt: skip
