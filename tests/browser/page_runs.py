"""A run folder with a few questions, three methods and two episodes, whose texts try to become markup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from query_mutator.evaluation.summary import Outcome, Results, summarize
from query_mutator.files import write_checked_json
from query_mutator.types import Question

SURROGATE = "half \ud83d of a pair"
HOSTILE = {
    "script": "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">",
    "closing": "</script></style></textarea><!-- <script> --> &lt;b&gt; ]]>",
    "separators": "one\u2028two\u2029three\x00\x1b[31m",
    "right_to_left": "abc \u202egnorw\u202c def \u05d0\u05d1\u05d2",
    "surrogate": SURROGATE,
    "huge": "A long answer. " * 70_000 + "<b>END</b>",
}
TAGS = ("slang", "wordy", "plain")
METHODS = ("identity", "best_plan", "policy")
QUESTIONS = 40


def write_run(folder: Path, *, seed: int = 0) -> Path:
    """Write a finished run; return its folder. `seed` changes which questions the policy gets right."""
    folder.mkdir(parents=True)
    write_checked_json(folder / "config.json", _config(seed))
    _write_lines(folder / "metrics.jsonl", [_metrics(step) for step in range(0, 513, 64)])
    _write_lines(folder / "transcripts.jsonl", [row for env in range(2) for row in _episode(env)])
    rows = [_result(place, method, seed) for method in METHODS for place in range(QUESTIONS + 2)]
    _write_lines(folder / "evaluation.jsonl", rows)
    write_checked_json(folder / "summary.json", {"eval": _report(rows), "eval_llm_calls": 9})
    return folder


def _report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what an evaluation says of its rows."""
    names = ("success", "score", "refused", "calls", "tokens")
    columns: dict[tuple[str, str], list[Outcome]] = {}
    questions: dict[str, dict[str, Question]] = {"test": {}, "guard": {}}
    for row in rows:
        name, tags = row["question_id"], tuple(row["tags"])
        question = Question(id=name, text=row["question"], accept=("sorted",), tags=tags, about=row["target"])
        questions[row["set"]][name] = question
        found = Outcome(question_id=name, asked=tuple(row["asked"]), **{key: row[key] for key in names})
        columns.setdefault((row["set"], row["method"]), []).append(found)
    test, guard = ([*questions[name].values()] for name in ("test", "guard"))
    outcomes, guarded = ({method: columns[name, method] for method in METHODS} for name in ("test", "guard"))
    return summarize(Results(questions=test, outcomes=outcomes, guard=guard, guarded=guarded))


def question_text(place: int) -> str:
    """Return a question of the run; some are hostile."""
    hostile = list(HOSTILE.values())[:5]
    return hostile[place] if place < len(hostile) else f"how do i sort list number {place} plz"


def answer_text(place: int, method: str) -> str:
    """Return the answer that is submitted."""
    hostile = list(HOSTILE.values())
    if method == "policy" and place < len(hostile):
        return hostile[place]
    return (
        "I'm sorry, but I can't help with that." if method == "identity" and place % 3 == 0 else f"Use sorted({place})."
    )


def is_right(place: int, method: str, seed: int) -> bool:
    """Return whether a method is right: the policy where the original question is not, and the reverse, for some."""
    return {"identity": place % 4 == 1, "best_plan": place % 2 == 1, "policy": (place + seed) % 4 in (1, 2)}[method]


def _result(place: int, method: str, seed: int) -> dict[str, Any]:
    text, is_guard = question_text(place), place >= QUESTIONS
    steps = {
        "identity": ["submit"],
        "best_plan": ["spelling", "submit"],
        "policy": ["spelling", "ask", "neutral", "submit"],
    }
    rewritten = text.replace("plz", "please")
    final = f"{rewritten} in Python"
    rewrites = {"identity": [text], "best_plan": [rewritten] * 2, "policy": [rewritten, rewritten, final, final]}[
        method
    ]
    asked = {"identity": [text], "best_plan": [rewritten], "policy": [rewritten, final]}[method]
    answers = [*(["first try"] if len(asked) > 1 else []), answer_text(place, method)]
    right = float(is_right(place, method, seed))
    return {
        "method": method,
        "set": "guard" if is_guard else "test",
        "question_id": f"q{place}",
        "question": text,
        "accepted": ["sorted"],
        "target": f"q{place}",
        "tags": [TAGS[place % 3]],
        "steps": steps[method],
        "rewrites": rewrites,
        "guards": [None] * len(rewrites),
        "asked": asked,
        "forms": ["as_is"] * len(asked),
        "answers": answers,
        "parts": [{"right": right, "meaning": 0.5}] * len(answers),
        "scores": [right] * len(answers),
        "fits": [0.25] * len(answers),
        "submitted": len(answers) - 1,
        "why": "the last answer fits best",
        "calls": len(steps[method]),
        "tokens": 20 * len(steps[method]),
        "reply_tokens": 5 * len(steps[method]),
        "seconds": 0.01,
        "success": 0.0 if is_guard else right,
        "score": right,
        "refused": is_guard or "sorry" in answers[-1],
        "error": None,
    }


def _episode(env: int) -> list[dict[str, Any]]:
    question = question_text(env * 7)
    rows = []
    for step, (name, answer) in enumerate((("spelling", ""), ("ask", HOSTILE["closing"]), ("submit", "done"))):
        rows.append(
            {
                "env": env,
                "step": step,
                "form": "quiz",
                "episode": 0,
                "question_id": f"t{env}",
                "operator": name,
                "question": question,
                "rewrite": f"{question} please",
                "answer": answer,
                "baseline_score": None,
                "score": 0.5 * env,
                "parts": {"right": float(env)} if answer else {},
                "reward": 0.25,
                "valid": True,
                "error": None,
                "calls": 1,
            }
        )
    return rows


def _metrics(step: int) -> dict[str, float]:
    share = 0.25 + step / 2048
    return {
        "step": step,
        "wall_s": step / 64,
        "charts/episodic_return": share,
        "validation/success": share,
        "validation/questions": 60,
        "validation/identity_success": 0.25,
        "losses/entropy": 2.0 - share,
        "llm/calls": step,
        "llm/calls_per_s": 50.0,
        "llm/latency_s": 0.02,
        "llm/queue_wait_s": 0.001,
        "llm/limit": 8,
    }


def _config(seed: int) -> dict[str, Any]:
    return {
        "flags": {"num_env_steps": 512, "seed": seed, "name": "<i>one</i>"},
        "command_line": "python train_query_mutator.py --name '<i>one</i>'",
        "versions": {"python": "3.11"},
        "hardware": {"cores": 2},
        "commit": "0" * 40,
        "started": "2026-01-02T03:04:05+0000",
        "resumed": [],
    }


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
