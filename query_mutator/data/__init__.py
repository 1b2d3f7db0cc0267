"""Question sets: where they come from, how they are read, how they are split."""

from query_mutator.data.bundled import guard_questions, python_docs
from query_mutator.data.loaders import load_questions
from query_mutator.data.split import Split, split_questions

__all__ = ["Split", "guard_questions", "load_questions", "python_docs", "split_questions"]
