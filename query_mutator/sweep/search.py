"""Settings chosen by Optuna's search, a batch at a time; the study is kept in the sweep's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from query_mutator.errors import UsageError
from query_mutator.files import JsonLines, read_json_lines
from query_mutator.sweep.plan import Setting, Trial, trials_of

if TYPE_CHECKING:
    from query_mutator.commands.sweep import SweepFlags

Evaluate = Callable[[Sequence[Setting]], list[float | None]]


def optuna_settings(
    ranges: Mapping[str, tuple[float, float]], evaluate: Evaluate, *, flags: SweepFlags, maximise: bool
) -> list[Trial]:
    """Return the trials of the settings that Optuna chose, each evaluated as its mean over seeds."""
    optuna = _optuna()
    settings: list[Setting] = []
    chosen = Path(flags.dir) / "optuna.jsonl"
    told = list(read_json_lines(chosen))[: flags.trials] if chosen.exists() else []
    sampler = optuna.samplers.TPESampler(seed=len(told), multivariate=True, constant_liar=True)
    study = optuna.create_study(direction="maximize" if maximise else "minimize", sampler=sampler)
    for row in told:
        study.add_trial(_known(optuna, row, ranges))
        settings.append(row["setting"])
    rows = JsonLines(chosen)
    while len(settings) < flags.trials:
        asked = [study.ask() for _ in range(min(flags.jobs, flags.trials - len(settings)))]
        batch = [_suggested(trial, ranges) for trial in asked]
        values = evaluate(batch)
        for trial, setting, value in zip(asked, batch, values, strict=True):
            study.tell(trial, value, state=optuna.trial.TrialState.FAIL if value is None else None)
            rows.append({"setting": setting, "value": value})
        settings += batch
    rows.close()
    return trials_of(settings, flags.trial_seeds)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UsageError("--sampler optuna needs the package optuna; pip install 'query-mutator[optuna]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _suggested(trial: Any, ranges: Mapping[str, tuple[float, float]]) -> Setting:
    return {
        name: trial.suggest_int(name, low, high, log=True)
        if isinstance(low, int) and isinstance(high, int)
        else float(f"{trial.suggest_float(name, low, high, log=True):.4g}")
        for name, (low, high) in ranges.items()
    }


def _known(optuna: Any, row: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]]) -> Any:
    kinds = optuna.distributions
    distributions = {
        name: (kinds.IntDistribution if isinstance(low, int) and isinstance(high, int) else kinds.FloatDistribution)(
            low, high, log=True
        )
        for name, (low, high) in ranges.items()
    }
    state = optuna.trial.TrialState.COMPLETE if row["value"] is not None else optuna.trial.TrialState.FAIL
    return optuna.trial.create_trial(
        params=row["setting"], distributions=distributions, value=row["value"], state=state
    )
