"""Statistics that evaluation, analysis, sweeps, IQN and batching share; imports nothing of the package.

`intervals` has confidence intervals (Wilson, Student's t, BCa bootstrap, Welch), those of rates over questions in
clusters; `paired` compares two methods on the same questions and says what that can
show, `significance` has tests, corrections for multiple comparisons and the power of seeds, `agreement` has scores of
probabilities, `sampling` has weighted draws. Import from the modules; `significance`, for the lab, loads scipy.
"""

from __future__ import annotations

__all__ = ["agreement", "intervals", "paired", "sampling", "significance"]
