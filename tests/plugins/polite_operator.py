"""An operator of one's own: a name, what it does in a line, and the prompt for the mutator model."""

from query_mutator.operators import OPERATORS, PromptOperator

OPERATORS.add(
    "polite",
    PromptOperator.of(
        "polite",
        "Ask politely",
        "Rewrite this question politely. Reply with the question only.\n<question>\n{question}\n</question>",
    ),
)
