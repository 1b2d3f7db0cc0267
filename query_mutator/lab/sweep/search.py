"""Settings chosen by Optuna's search, in batches; every result is kept in the sweep's folder, so a rerun resumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.files.json_lines import JsonLines, read_json_lines
from query_mutator.lab.sweep.config import SweepFlags
from query_mutator.lab.sweep.plan import Setting

__all__ = ["optuna_settings"]

Evaluate = Callable[[Sequence[Setting]], list[float | None]]


def optuna_settings(
    ranges: Mapping[str, tuple[float, float]], evaluate: Evaluate, *, flags: SweepFlags, batch: int, maximize: bool
) -> list[Setting]:
    """Return the settings that Optuna chose, `batch` at a time.

    `evaluate` returns the mean of each setting of a batch over its seeds.
    """
    optuna = _optuna()
    path = Path(flags.dir) / "optuna.jsonl"
    known = list(read_json_lines(path))[: flags.trials] if path.exists() else []
    sampler = optuna.samplers.TPESampler(seed=len(known), multivariate=True, constant_liar=True)
    study = optuna.create_study(direction="maximize" if maximize else "minimize", sampler=sampler)
    distributions = {name: _distribution(optuna, *ends) for name, ends in ranges.items()}
    states = optuna.trial.TrialState
    for row in known:
        study.add_trial(
            optuna.trial.create_trial(
                params=row["setting"],
                distributions=distributions,
                value=row["value"],
                state=states.FAIL if row["value"] is None else states.COMPLETE,
            )
        )
    settings: list[Setting] = [row["setting"] for row in known]
    rows = JsonLines(path)
    while len(settings) < flags.trials:
        asked = [study.ask(distributions) for _ in range(min(batch, flags.trials - len(settings)))]
        chosen = [{name: _rounded(value) for name, value in trial.params.items()} for trial in asked]
        for trial, setting, value in zip(asked, chosen, evaluate(chosen), strict=True):
            study.tell(trial, value, state=states.FAIL if value is None else None)
            rows.append({"setting": setting, "value": value})
        settings += chosen
    rows.close()
    return settings


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UsageError("--sampler optuna needs the package optuna; pip install 'query-mutator[optuna]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(optuna: Any, low: float, high: float) -> Any:
    whole = isinstance(low, int) and isinstance(high, int)
    kind = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
    return kind(low, high, log=True)


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")
