"""The harness of a language model as the policy: it gets the question, replies with actions, sees what they led to."""

from __future__ import annotations

import functools
import re
import ssl
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import verifiers.v1 as vf
from pydantic import Field

from query_mutator.errors import BackendError
from query_rewriting.environments import REWRITE, Environments
from rl_query_mutator_env import QueryMutationEnv

__all__ = ["INFO", "QueryRewritingHarness", "actions_in", "instructions", "metrics_of"]

INFO = "query_rewriting"  # of `trace.info`: what a rollout did
CONTROLS = ("ask", "undo", "submit")
NOT_READ = "No action was found. Reply with one action on a line, such as:\nASK\n"
_LINE = re.compile(r"\W*(rewrite|operator|form|ask|undo|submit)\b[\s:*\"`']*(.*?)[\"`*]*\s*", re.IGNORECASE)
_TOLD = """\
You improve questions for another language model, the target, so that its answer is right. You never answer a question \
yourself: you change its wording or its form, and the meaning stays the same.

Reply with actions only, one on a line:
REWRITE question    the question in your own words
{operators}{forms}ASK                 the target answers the question as it now is, and you see the answer
UNDO                back to the original question
SUBMIT              the end; the last answer is submitted, and the target is asked if it was not yet

There are at most {steps} actions.
"""


class QueryRewritingHarnessConfig(vf.HarnessConfig):
    """How the policy is asked."""

    id: vf.ID = "query-rewriting"
    max_retries: int = Field(2, ge=0)
    """Retries of a call to the policy's model after a transient failure."""
    examples: bool = True
    """Begin the conversation with two short episodes."""


class QueryRewritingHarness(vf.Harness[QueryRewritingHarnessConfig]):
    """Plays an episode in this process; every call to the policy's model goes through the run's interception."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play until the policy submits or a limit ends it, and then submit; BackendError for a call that failed."""
        environments: Environments = trace.state.environments
        policy = openai.AsyncOpenAI(
            base_url=endpoint,
            api_key=secret,
            max_retries=self.config.max_retries,
            http_client=openai.DefaultAsyncHttpxClient(verify=_certificates()),
        )
        env = await environments.run(environments.take)
        episode = _Episode(environments, env)
        try:
            async with policy:
                await episode.begin(data.question)
                messages: list[Any] = [{"role": "system", "content": data.system_prompt}]
                messages += examples(env, environments.max_steps) if self.config.examples else []
                messages.append({"role": "user", "content": f"Question: {data.prompt_text}"})
                for _ in range(environments.max_steps):
                    if env.has_ended or (reply := await _reply(policy, ctx.model, messages, trace)) is None:
                        break
                    told = await episode.take(reply.content or "")
                    messages += [reply.to_dict(), {"role": "user", "content": told}]
            if not env.has_ended:
                await episode.act("submit", "")
        except BackendError as error:
            episode.did["error"] = {"kind": error.kind, "message": str(error)}
            raise
        finally:
            trace.info[INFO] = episode.did
            trace.record_metrics(metrics_of(trace))
            environments.give_back(env)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class _Episode:
    """An episode whose actions a language model names in words."""

    def __init__(self, environments: Environments, env: QueryMutationEnv) -> None:
        self._environments, self._env = environments, env
        self.did: dict[str, Any] = {"actions": [], "unread": 0, "calls": 0, "error": None}

    async def begin(self, question: int) -> None:
        """Reset the environment to a question."""
        await self._environments.run(self._env.reset, options={"question": question})

    async def take(self, reply: str) -> str:
        """Carry out the actions of a reply, up to one that asks; return what the policy is told."""
        named = list(actions_in(reply))
        self.did["unread"] += not named
        told = "" if named else NOT_READ
        for name, words in named:
            if name not in self._env.task.actions:
                told = f"There is no {name[:40]!r}.\n"
                break
            before = self._env.episode.text
            await self.act(name, words)
            unused = name == REWRITE and words != before == self._env.episode.text
            told = "The rewrite was not used: its meaning is another one.\n" if unused else ""
            if name == "ask" or self._env.has_ended:
                break
        episode = self._env.episode
        left = self._environments.max_steps - len(self.did["actions"])
        return told + shown(episode.text, episode.form, episode.answer, left)

    async def act(self, name: str, words: str) -> None:
        """Take an action, and note it and what it led to."""
        info = await self._environments.step(self._env, name, words)
        episode, said = self._env.episode, info["_text"]
        self.did["actions"].append({"action": name, "text": episode.text, "form": episode.form})
        self.did |= {key: float(info[key]) for key in ("score", "success", "calls")}
        self.did["submitted"] = {"text": said["rewrite"], "form": said["form"], "answer": said["answer"]}


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the certificates, once: a client of its own for each rollout would read them for a tenth of a second."""
    return ssl.create_default_context()


async def _reply(policy: openai.AsyncOpenAI, model: str, messages: list[Any], trace: vf.Trace) -> Any:
    """Return the policy's message; None when a limit of the rollout refused the call."""
    try:
        completion = await policy.chat.completions.create(model=model, messages=messages)
    except openai.APIStatusError:
        if trace.stop_condition is not None:
            return None
        raise
    return completion.choices[0].message


def metrics_of(trace: vf.Trace) -> dict[str, float]:
    """Return the counts of a rollout, the policy's calls apart from those to target and rewriter."""
    did = trace.info[INFO]
    return {
        "success": did.get("success", 0.0),
        "policy_calls": len(trace.calls),
        "target_calls": did["calls"],
        "actions": len(did["actions"]),
        "unread_replies": did["unread"],
    }


# --- words ------------------------------------------------------------------------------------------------------------


def instructions(env: QueryMutationEnv, steps: int) -> str:
    """Return what the policy is told: its actions, with the operators and forms of an environment."""
    operators = [one for one in env.task.operators if one.name != REWRITE]
    return _TOLD.format(
        operators=_listed("OPERATOR", "a rewrite by a rule or another model", operators),
        forms=_listed("FORM", "how the target gets the question", env.task.forms),
        steps=steps,
    )


def _listed(word: str, meaning: str, named: Sequence[Any]) -> str:
    lines = [f"    {one.name}: {one.summary}" for one in named]
    return "\n".join([f"{f'{word} name':<20}{meaning}:", *lines, ""]) if lines else ""


def examples(env: QueryMutationEnv, steps: int) -> list[dict[str, str]]:
    """Return the turns of two episodes as messages; small models imitate them where they follow no instructions."""
    first, second = "What is the capital of France?", "Who wrote Hamlet?"
    form = env.task.forms[0].name if env.task.forms else ""
    turns = [
        ("Question: wats the captial of france", f"REWRITE {first}\nASK"),
        (shown(first, "as_is", "The capital of France is Paris.", steps - 2), "SUBMIT"),
        (f"Question: {second}", f"FORM {form}\nASK" if form else "ASK"),
        (shown(second, form or "as_is", "William Shakespeare wrote Hamlet.", steps - 2), "SUBMIT"),
    ]
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


def shown(text: str, form: str, answer: str | None, steps_left: int) -> str:
    """Return what the policy is told after a reply: the question as it now is, and the answer to it if it was asked."""
    said = "" if answer is None else f"Answer of the target: {answer}\n"
    return f"Question now: {text}\nForm: {form}\n{said}Actions left: {steps_left}"


def actions_in(reply: str) -> Iterator[tuple[str, str]]:
    """Yield (action, words) for each line of a reply that is an action; words are those of a rewrite."""
    for line in reply.splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        word, rest = found[1].lower(), found[2].strip()
        if word == REWRITE and rest:
            yield REWRITE, rest
        elif word in CONTROLS and not rest.strip(".!"):  # else a sentence that begins with it
            yield word, ""
        elif word in ("operator", "form") and rest:
            yield rest.split()[0].strip(".,:;"), ""
