"""Read what a reply says finally, with its type, from the question and the reply.

`read` returns the final answer of a kind, `Gold` says whether a reply gives an accepted answer, `is_refusal` whether it
declines. Graders, votes, P(right), the gate and the page use them; nothing else reads a reply's text. Only `Gold` knows
the accepted answers.
"""

from query_mutator.reading.gold import Gold, family_of, kind_of_gold
from query_mutator.reading.refusals import first_sentence, is_not_sure, is_refusal
from query_mutator.reading.reply import Kind, read

__all__ = ["Gold", "Kind", "family_of", "first_sentence", "is_not_sure", "is_refusal", "kind_of_gold", "read"]
