"""`qm rescore`: score the answers of a run again, with other reward parts or another judge.

RUN-rescored/transcripts.jsonl, evaluation.jsonl    the run's rows with the new scores
RUN-rescored/rescore.json                           the reward, and what changed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from query_mutator.bounds import group_of
from query_mutator.cli.common import JsonFlags, show
from query_mutator.cli.console import note
from query_mutator.cli.outputs import Output, holding, write_report
from query_mutator.commands.policy_flags import RunFlags, max_failure_rate, system_settings
from query_mutator.encoder import Encoder
from query_mutator.env.scheduling import make_scheduler
from query_mutator.errors import DatasetError, UnnamedError, UsageError
from query_mutator.evaluation.rescoring import (
    Gold,
    Scoring,
    changes,
    changes_text,
    check_ratings,
    open_outcomes,
    open_steps,
    outcome_rows,
    rate,
    step_rows,
)
from query_mutator.files import atomic_folder, read_checked_json
from query_mutator.files.json_lines import JsonLines, read_json_lines
from query_mutator.report.page.rows import check_outcomes, check_steps
from query_mutator.rewards import WeightedReward
from query_mutator.session.background import check_encoder
from query_mutator.session.dataset import read_dataset
from query_mutator.session.failure_rate import FailureWindow
from query_mutator.session.judging import make_judge, make_reward
from query_mutator.session.loading import load_saved, training_split
from query_mutator.session.models import OpenModels, encoder_of, open_models
from query_mutator.session.policy_file import SavedPolicy
from query_mutator.session.trust import check_reach
from query_mutator.settings.episode import TaskSettings
from query_mutator.settings.models import ModelSettings
from query_mutator.settings.questions import Columns, Reward

__all__ = ["RescoreFlags", "rescore"]

REPORT = "rescore.json"
STEPS, OUTCOMES = "transcripts.jsonl", "evaluation.jsonl"
_REWARD = {one.name for one in fields(Reward)}


def _is_own(path: Path) -> bool:
    return (path / REPORT).is_file() and holding(b'"rescored":')(path / REPORT)


@dataclass(frozen=True, kw_only=True)
class RescoreFlags(RunFlags, Columns, Reward, JsonFlags):
    """Score the answers of a run again with --reward or another judge, without asking the target.

    Training steps and held-out questions get new scores in a folder next to the run, and a table shows what changed.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "run", "reward", "judge_model", "judge_rubric", "judge_form", "rows", "dataset", "out", "force", "json",
        "backend", "ollama_url", "openai_url", "batch_size",
    )  # fmt: skip
    rows: str | None = None
    """File of `qm eval --evaluation` whose rows are scored in place of those of the run."""
    dataset: str | None = None
    """Questions with what is accepted, a file or a name; by default those of the training, whose gold may be new."""
    out: Annotated[str, Output(_is_own, is_folder=True)] = ""
    """Folder to write; by default the run's name and -rescored, next to the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if named := self.target_model or self.mutator_model:
            raise ValueError(f"{named} is not asked again; --judge-model names the model that judges")
        if not self.out:
            run = Path(self.checkpoint).resolve()
            object.__setattr__(self, "out", str(run.with_name(f"{run.name if run.is_dir() else run.stem}-rescored")))


def rescore(flags: RescoreFlags) -> None:
    """Write the folder, and print the table or write it with --json; TooManyFailuresError when a judge fails."""
    saved = load_saved(flags.checkpoint, flags.plugin)
    settings = _settings(flags, saved)
    rows = _rows(flags)
    gold = _gold(flags, saved)
    steps, outcomes = open_steps(rows[STEPS], gold), open_outcomes(rows[OUTCOMES], gold)
    with _scoring(flags, saved, settings) as scoring:
        answers = [answer for one in steps for answer in one.answers]
        ratings = rate([*answers, *(answer for one in outcomes for answer in one.answers)], scoring)
    new = {
        STEPS: list(step_rows(steps, ratings, prices=saved.checkpoint.task.call_price)),
        OUTCOMES: list(outcome_rows(outcomes, ratings)),
    }
    pairs = (zip(rows[name], new[name], strict=True) for name in (STEPS, OUTCOMES))
    reward, judge = scoring.reward, scoring.reward.judge
    about = {
        "rescored": flags.rows or flags.checkpoint,
        "reward": ",".join(f"{name}={weight:.3g}" for name, weight in reward.weights.items()),
        "judge": {"model": judge.model, "rubric": judge.rubric, "form": judge.form} if judge else None,
    }
    report = about | changes(*pairs)
    _write(Path(flags.out), new, report)
    show(flags, report, changes_text(report))
    note(flags.out)
    check_ratings(ratings, max_failure_rate=max_failure_rate(flags, saved.checkpoint))


def _settings(flags: RescoreFlags, saved: SavedPolicy) -> TaskSettings:
    """Return the settings of the training with the reward of the flags; UnnamedError for a judge only a file names."""
    task, given = saved.checkpoint.task, {name: getattr(flags, name) for name in _REWARD & flags.given}
    if "judge" not in WeightedReward.parse(given.get("reward") or "judge").weights:
        given = {"judge_model": None, **given}
    settings = replace(task, **given)
    make_reward(settings)
    check_reach({"judge_model": settings.judge_model}, source=saved.checkpoint.path, named=given)
    return settings


def _rows(flags: RescoreFlags) -> dict[str, list[dict[str, Any]]]:
    """Return the rows to score by the name of their file; UsageError where there are none."""
    run = Path(flags.checkpoint)
    paths = {STEPS: run / STEPS, OUTCOMES: run / OUTCOMES} if not flags.rows else {OUTCOMES: Path(flags.rows)}
    if flags.rows and not paths[OUTCOMES].is_file():
        raise UsageError(f"--rows {flags.rows}: no such file; give one of `qm eval --evaluation`")
    found = {name: list(read_json_lines(path)) if path.is_file() else [] for name, path in paths.items()}
    if not any(found.values()):
        raise UsageError(f"{run} has no answers ({STEPS}, {OUTCOMES}); give a run folder, or --rows FILE of qm eval")
    check_steps(found.get(STEPS, ()), run / STEPS)
    check_outcomes(found[OUTCOMES], paths[OUTCOMES])
    return {STEPS: [], **found}


def _gold(flags: RescoreFlags, saved: SavedPolicy) -> Gold:
    """Return the questions of --dataset, else those of the training; where these are gone, those the run keeps."""
    if flags.dataset is not None:
        columns = {name: getattr(flags, name) for name in ("question_column", "answer_column")}
        found = read_dataset(replace(saved.checkpoint.task, dataset=flags.dataset, **columns), for_training=False)
        return Gold.of((*found.questions, *found.guard), is_unchanged=False)
    try:
        split = training_split(saved)
    except (DatasetError, UnnamedError) as error:
        if saved.background is None or not saved.background.has_gold:
            raise
        note(f"{error}; using the training questions that the run keeps")
        return Gold.of(saved.background.train, is_unchanged=not flags.encoder)
    config = Path(flags.checkpoint) / "config.json"
    recorded = read_checked_json(config).get("dataset_sha256") if config.is_file() else None
    questions = (*split.train, *split.validation, *split.test, *split.guard)
    return Gold.of(questions, is_unchanged=not flags.encoder and recorded == split.sha256)


@contextmanager
def _scoring(flags: RescoreFlags, saved: SavedPolicy, settings: TaskSettings) -> Iterator[Scoring]:
    """Yield the reward and what its parts need: models are opened if one asks a model."""
    with ExitStack() as stack:
        models, judge, scheduler = None, None, None
        if make_reward(settings).asking:
            models = stack.enter_context(_models(flags, saved, settings))
            judge = make_judge(models.calls, settings, seed=settings.seed)
            calls = (models.settings.calls_in_flight, models.calls.eval_client, models.encoder)
            scheduler = make_scheduler(*calls, models.retry_policy)

        def open_encoder() -> Encoder:
            if models is None and (flags.encoder or saved.checkpoint.system.encoder).startswith("ollama:"):
                return stack.enter_context(_models(flags, saved, settings)).encoder
            return models.encoder if models else stack.enter_context(closing(_encoder(flags, saved)))

        yield Scoring(
            reward=make_reward(settings, judge=judge),
            open_encoder=open_encoder,
            scheduler=scheduler,
            window=FailureWindow(max_failure_rate(flags, saved.checkpoint), unit="answers"),
        )


def _models(flags: RescoreFlags, saved: SavedPolicy, settings: TaskSettings) -> OpenModels:
    """Return the models of the training with the judge in place of those that answer and rewrite."""
    judge = settings.judge_model
    names = {"target_model": judge, "mutator_model": judge} if judge else {}
    checkpoint = saved.checkpoint
    return open_models(system_settings(flags, checkpoint.system, source=checkpoint.path, **names))


def _encoder(flags: RescoreFlags, saved: SavedPolicy) -> Encoder:
    """Return the encoder of the training, or that of --encoder; no server is asked."""
    system, given = saved.checkpoint.system, {"encoder": flags.encoder, "device": flags.device}
    check_reach({"encoder": system.encoder}, source=saved.checkpoint.path, named=given)
    settings = group_of(ModelSettings, system, **{name: value for name, value in given.items() if value})
    encoder = encoder_of(settings, None)
    if saved.background is not None and not flags.encoder:
        check_encoder(saved.background, encoder, path=saved.checkpoint.path)
    return encoder


def _write(out: Path, rows: dict[str, list[dict[str, Any]]], report: dict[str, Any]) -> None:
    with atomic_folder(out) as folder:
        for name in rows:
            if rows[name]:
                with closing(JsonLines(folder / name)) as file:
                    file.append(*rows[name])
        write_report(folder / REPORT, report)
