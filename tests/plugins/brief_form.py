"""A form of one's own: a name, what it does in a line, and the request that it makes of a question."""

from query_mutator.forms import FORMS, Form, FormContext, Framed


def brief(question: str, context: FormContext) -> Framed:
    return Framed.user(f"Question: {question}\nAnswer:", system="Be brief.", options={"stop": ["\n"]})


BRIEF = Form(name="brief", summary="Briefly.", function=brief)
FORMS.add("brief", BRIEF)
