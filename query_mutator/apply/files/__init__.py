"""A file of questions answered: one JSON object per line in, one row per line out, in the same order.

`lines` reads OpenAI's batch format and rows of question sets, `rows` writes the rows of answers and errors, `journal`
keeps every answered call on disk, `run` keeps `--batch-size` calls in flight. Imported by the commands only.
"""

__all__ = ["journal", "lines", "rows", "run"]
