"""A server of puzzle gyms, for the clients of `query_mutator.batching.streaming`.

`server` has GymServer and GymnasiumTextEnv, which serves a gymnasium environment; `session` has the line protocol
without a socket, the TextEnv interface and the records Game and StepOutcome. `qm gym serve` serves the rewriting of
questions with it. Import from the modules.
"""

__all__ = ["server", "session"]
