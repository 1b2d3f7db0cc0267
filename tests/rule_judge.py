"""`rule-judge`: a model for tests that grades by words.

It says yes to an answer that contains an accepted text, and to every answer where none is given.
"""

from __future__ import annotations

import re

#: The material of `rewards.judge`: parts between lines with the same mark.
_PART = re.compile(
    r"^\[(?P<mark>[0-9a-f]{12}) (?P<name>[a-z ]+)\]\n(?P<text>.*?)\n\[(?P=mark) end\]$", re.DOTALL | re.MULTILINE
)
_HELP = "I grade answers that stand between the marks of query_mutator.rewards."


class RuleJudge:
    """Answers `yes` or `no` to the prompts of a judge, and says what it is to every other prompt."""

    name = "rule-judge"

    def reply(self, prompt: str) -> str:
        """Return the verdict on one prompt."""
        found = list(_PART.finditer(prompt))
        parts = {match["name"]: match["text"] for match in found if match["mark"] == found[0]["mark"]}
        if "answer to grade" not in parts:
            return _HELP
        said = f" {_words(parts['answer to grade'])} "
        accepted = parts.get("accepted answers", "").splitlines()
        return "yes" if not accepted or any(f" {_words(text)} " in said for text in accepted) else "no"


def _words(text: str) -> str:
    return " ".join(re.findall(r"[\w.]*\w", text.lower()))
