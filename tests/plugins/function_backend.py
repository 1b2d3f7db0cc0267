"""A backend of one's own: a function in this process answers."""

from query_mutator.llm.backends import BACKENDS
from query_mutator.llm.client import ModelServer
from query_mutator.types import ChatRequest, Completion


@BACKENDS.register("function")
class FunctionBackend(ModelServer):
    """Rewrites by changing the case, and answers with one word in backticks."""

    title = "a local function"

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply; a rewrite is the question within the prompt."""
        text = request.messages[-1].content
        if request.purpose == "mutate":
            question = text.partition("<question>")[2].partition("</question>")[0]
            return Completion(text=question.strip().lower(), model=request.model)
        return Completion(text=f"`{text.split()[-1].strip('?')}` is what you want.", model=request.model)
