"""The prompt optimizers of DSPy and GEPA on plain prompts, for `benchmarks/prompt_optimizers.py`; needs dspy and gepa.

All begin with the seed's sentence, show examples of the same bank, and are scored by the same grader. Of three settings
of each the caller keeps the one that is best on validation questions.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dspy
from dspy.lm15 import Message, Request, Response, TextPart, Usage
from dspy.teleprompt.gepa.instruction_proposal import InstructionProposer
from dspy.utils.exceptions import AdapterParseError

from benchmarks.plain_prompts import BY_HAND, SEED, TEMPLATES, Asker, has_no_reply, messages_of, task_text
from query_mutator import types

__all__ = ["RIVALS", "Lab", "Rival", "configured", "example_of"]

MAX_TOKENS = 32  # of an answer, as in every other benchmark of this model
TASK_TOKENS = 128  # of an instruction that the model proposes
MINIBATCH = 35  # of MIPROv2, as it is by default
Settings = Mapping[str, Any]
ANSWERING = {"question", "answer"}


class Engine:
    """The calls of DSPy through an `Asker`."""

    def __init__(self, asker: Asker) -> None:
        self.asker = asker

    def complete(self, request: Request) -> Response:
        """Return one reply; RuntimeError without one, which DSPy scores as a wrong answer."""
        messages = [types.Message(role=one.role, content=one.text or "") for one in request.messages]
        config = request.config
        reply = self.asker.ask(messages, max_tokens=config.max_tokens, temperature=float(config.temperature or 0))
        if has_no_reply(reply):
            raise RuntimeError(str(reply.error))
        return Response(
            id=None,
            model=request.model,
            message=Message.assistant([TextPart(reply.text)]),
            finish_reason="stop",  # a reply of 32 tokens is an answer, and nothing to warn of
            usage=Usage(input_tokens=reply.prompt_tokens, output_tokens=reply.completion_tokens),
        )

    def __deepcopy__(self, memo: Any) -> Engine:
        return self  # copies of a program share the calls

    def close(self) -> None:
        """Release nothing: the asker belongs to the caller."""


class PlainAdapter(dspy.Adapter):
    """Renders a prompt without field markers, and reads the whole reply into the only output."""

    def format(
        self, signature: type[dspy.Signature], demos: Sequence[Any], inputs: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the messages of a call."""
        if {*signature.fields} == ANSWERING:
            shown = [(demo["question"], demo["answer"]) for demo in demos]
            turns = messages_of(signature.instructions, shown, inputs["question"])
            return [{"role": turn.role, "content": turn.content} for turn in turns]
        text = task_text(signature.instructions, inputs, next(iter(signature.output_fields)))
        return [{"role": "user", "content": text}]

    def parse(self, signature: type[dspy.Signature], completion: str) -> dict[str, Any]:
        """Return the reply by the name of the output; AdapterParseError for other than one output."""
        names = [*signature.output_fields]
        if len(names) != 1 or not completion.strip():
            raise AdapterParseError(adapter_name="PlainAdapter", signature=signature, lm_response=completion)
        return {names[0]: completion.strip()}


class Answer(dspy.Module):
    """One call that answers a question."""

    def __init__(self, instruction: str = SEED) -> None:
        super().__init__()
        self.answer = dspy.Predict(dspy.Signature("question -> answer", instruction))

    def forward(self, question: str) -> dspy.Prediction:
        """Return the answer."""
        return self.answer(question=question)


@dataclass(frozen=True, kw_only=True)
class Lab:
    """What an optimizer works with: examples to show, questions to score on, the grader, and how many calls it has."""

    asker: Asker
    bank: list[dspy.Example]
    questions: list[dspy.Example]  # of the training part; the first ones are scored
    right: Callable[[dspy.Example, str], float]
    encode: Callable[[list[str]], Any]
    calls: int
    threads: int

    @property
    def size(self) -> int:
        """Return how many questions a candidate is scored on."""
        return min(len(self.questions), max(10, min(150, self.calls // 10)))

    @property
    def scored(self) -> list[dspy.Example]:
        """Return the questions that candidates are scored on."""
        return self.questions[: self.size]

    @property
    def reflected(self) -> list[dspy.Example]:
        """Return the questions that an optimizer learns from, other than those it scores on."""
        return self.questions[self.size :] or self.questions

    def metric(self, example: dspy.Example, prediction: Any, trace: Any = None) -> float:
        """Return 1 for a right answer, else 0."""
        return self.right(example, prediction.answer)

    def feedback(
        self, example: Any, prediction: Any, trace: Any = None, name: str | None = None, of: Any = None
    ) -> Any:
        """Return the score, for GEPA with the right answer in words."""
        score = self.metric(example, prediction)
        if name is None:
            return score
        said = "Right." if score else f"Wrong. The right answer is: {example.answer}."
        return dspy.Prediction(score=score, feedback=said)

    def prompt_model(self) -> dspy.LM:
        """Return the model with room for an instruction."""
        return lm_of(self.asker, max_tokens=TASK_TOKENS, temperature=1.0)


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A method with three settings; `make` returns the program that a setting leads to."""

    title: str
    make: Callable[[Lab, Settings], dspy.Module]
    settings: tuple[Settings, ...]
    is_cleaned: bool = True


def random_search(lab: Lab, setting: Settings) -> dspy.Module:
    """Return the best of random sets of bootstrapped and labelled examples."""
    found = dspy.BootstrapFewShotWithRandomSearch(
        metric=lab.metric,
        num_candidate_programs=max(1, lab.calls // lab.size - 4),  # next to three of its own, and bootstrapping
        num_threads=lab.threads,
        **setting,
    )
    return found.compile(Answer(), trainset=lab.bank, valset=lab.scored)


def nearest(lab: Lab, setting: Settings) -> dspy.Module:
    """Return the program that shows the nearest examples of the bank."""
    few_shot = dspy.KNNFewShot(
        trainset=lab.bank,
        vectorizer=dspy.Embedder(lambda texts: lab.encode(texts)),  # a bound method is copied with its locks
        k=setting["k"],
        max_labeled_demos=setting["k"],
        max_bootstrapped_demos=0,  # else each question costs calls for its examples
    )
    return few_shot.compile(Answer())


class MIPROWithForms(dspy.MIPROv2):
    """MIPROv2 whose candidates are our forms in addition to what the model proposes."""

    def _propose_instructions(self, *arguments: Any, **settings: Any) -> dict[int, list[str]]:
        found = super()._propose_instructions(*arguments, **settings)
        return {at: [*texts, *TEMPLATES] for at, texts in found.items()}


def mipro(lab: Lab, setting: Settings) -> dspy.Module:
    """Return the best of instructions and sets of examples by MIPROv2."""
    batch = min(MINIBATCH, lab.size)
    found = MIPROWithForms(
        metric=lab.metric,
        prompt_model=lab.prompt_model(),
        task_model=lm_of(lab.asker),
        auto=None,
        num_candidates=6,
        num_threads=lab.threads,
        **setting,
    )
    return found.compile(
        Answer(),
        trainset=lab.bank,
        valset=lab.scored,
        num_trials=max(3, (lab.calls - 3 * lab.size) // (batch + lab.size // 5)),  # every fifth is scored on all
        minibatch_size=batch,
        program_aware_proposer=False,  # the program is one call
    )


def best_of_n(lab: Lab, setting: Settings) -> dspy.Module:
    """Return the program that keeps the likeliest of N replies, or the first that the model ended itself."""
    rewards = {"logprob": lambda reply: reply.logprob, "ended": lambda reply: 1.0 - reply.hit_limit}
    reward = rewards[setting["reward"]]
    return dspy.BestOfN(
        module=Answer(),
        N=setting["N"],
        reward_fn=lambda inputs, prediction: float(reward(lab.asker.last)),
        threshold=1.0,
    )


def gepa(lab: Lab, setting: Settings) -> dspy.Module:
    """Return the instruction that GEPA reaches with the model itself as the one that reflects."""
    return _evolved(lab, setting, InstructionProposer(adapter=PlainAdapter()))


def gepa_by_hand(lab: Lab, setting: Settings) -> dspy.Module:
    """Return the instruction that GEPA reaches by proposals of ours: the forms, and twelve written by hand."""
    proposals = itertools.cycle(one for pair in itertools.zip_longest(TEMPLATES, BY_HAND) for one in pair if one)

    def propose(candidate: Mapping[str, str], reflective_dataset: Any, components_to_update: list[str]) -> Any:
        return {name: next(proposals) for name in components_to_update}

    return _evolved(lab, setting, propose)


def _evolved(lab: Lab, setting: Settings, proposer: Any) -> dspy.Module:
    search = dspy.GEPA(
        metric=lab.feedback,
        reflection_lm=lab.prompt_model(),
        instruction_proposer=proposer,
        max_metric_calls=lab.calls,
        num_threads=lab.threads,
        **setting,
    )
    return search.compile(Answer(), trainset=lab.reflected, valset=lab.scored)


_DEMOS = (
    {"max_bootstrapped_demos": 2, "max_labeled_demos": 2},
    {"max_bootstrapped_demos": 4, "max_labeled_demos": 4},
)
_GEPA = (
    {"reflection_minibatch_size": 3},
    {"reflection_minibatch_size": 10},
    {"reflection_minibatch_size": 10, "candidate_selection_strategy": "current_best"},
)
RIVALS: Mapping[str, Rival] = {
    "random-search": Rival(
        title="BootstrapFewShotWithRandomSearch",
        make=random_search,
        settings=(*_DEMOS, {"max_bootstrapped_demos": 4, "max_labeled_demos": 8}),
    ),
    "knn": Rival(title="KNNFewShot", make=nearest, settings=({"k": 2}, {"k": 4}, {"k": 8})),
    "knn-without-clean": Rival(
        title="KNNFewShot, without clean", make=nearest, settings=({"k": 2}, {"k": 4}, {"k": 8}), is_cleaned=False
    ),
    "mipro": Rival(
        title="MIPROv2, our forms among its candidates",
        make=mipro,
        settings=({"max_bootstrapped_demos": 0, "max_labeled_demos": 0}, *_DEMOS),
    ),
    "best-of-n": Rival(
        title="BestOfN",
        make=best_of_n,
        settings=({"N": 2, "reward": "logprob"}, {"N": 3, "reward": "logprob"}, {"N": 3, "reward": "ended"}),
    ),
    "gepa-itself": Rival(title="GEPA, the 135M model reflects: no evidence about GEPA", make=gepa, settings=_GEPA),
    "gepa-by-hand": Rival(title="GEPA, proposals by hand", make=gepa_by_hand, settings=_GEPA),
}


def lm_of(asker: Asker, *, max_tokens: int = MAX_TOKENS, temperature: float = 0.0) -> dspy.LM:
    """Return a model of DSPy that asks through an asker."""
    engine = Engine(asker)
    return dspy.LM("plain", engine=engine, max_tokens=max_tokens, temperature=temperature, cache=False, num_retries=0)


def configured(asker: Asker) -> None:
    """Let all programs of DSPy ask through an asker; it has the only cache."""
    for name in ("dspy", "gepa"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)
    dspy.configure(lm=lm_of(asker), adapter=PlainAdapter())


def example_of(question: str, answer: str) -> dspy.Example:
    """Return a question with its answer as DSPy has it."""
    return dspy.Example(question=question, answer=answer).with_inputs("question")


def answers_of(program: dspy.Module, examples: Sequence[dspy.Example], *, threads: int) -> list[str]:
    """Return the answers of a program, "" where its reply was empty."""
    evaluate = dspy.Evaluate(
        devset=[*examples], metric=lambda example, prediction: 0.0, num_threads=threads, max_errors=len(examples) + 1
    )
    return [prediction.get("answer") or "" for _, prediction, _ in evaluate(program).results]
