"""One reading of a reply: the question and the reply give what was said finally, with its type.

Offers `read` (the final answer of a kind), `Gold` (does a reply say what is accepted?), `is_refusal`, `is_not_sure`,
and in `keys` the groups of replies that say the same. Graders, votes, P(right), the gate and the page use them;
nothing else reads a reply's text. A question's gold is known to `Gold` alone.
"""

from query_mutator.reading.gold import Gold, family_of
from query_mutator.reading.refusals import first_sentence, is_not_sure, is_refusal
from query_mutator.reading.reply import Kind, read

__all__ = ["Gold", "Kind", "family_of", "first_sentence", "is_not_sure", "is_refusal", "read"]
