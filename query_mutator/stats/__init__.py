"""Statistics that evaluation, analysis, sweeps, IQN and batching share; imports nothing of the package.

`intervals` has confidence intervals (Wilson, Student's t, BCa bootstrap, Welch), `resampling` those of rates over
questions in clusters, `paired` compares two methods on the same questions, `power` says what that can show,
`significance` has tests, corrections for multiple comparisons and the power of seeds, `calibration` has scores of
probabilities, `tasks` has aggregates over several tasks, `sampling` has weighted draws. Import from the modules; scipy
is loaded when a function first needs it.
"""

from __future__ import annotations

__all__ = ["calibration", "intervals", "paired", "power", "resampling", "sampling", "significance", "tasks"]
