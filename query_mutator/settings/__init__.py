"""Every setting, once: small groups of fields with type, bounds, default, help text and aliases.

    calls.py        Context, Connection, Calls                 how calls are made
    models.py       Address, Models, Sampling, Simulation,     who rewrites, answers and embeds
                    Encoding, ModelSettings (all that opening the models takes)
    questions.py    Questions, Reward                          what is asked, and what a good answer is
    episode.py      Operators, CallRules, Episode, TaskSettings (all that making a task takes)
    learner.py      Learning, and IQNConfig, DirectConfig next to ppo's PPOConfig
    evaluation.py   Evaluation, FailureRate                    comparisons, and when too many calls failed
    output.py       Plugins, RunFolder, Run                    where a run is kept

A command is a dataclass that inherits the groups it needs; a program makes a group, or passes such a dataclass on as
one. `defaults` (`query_mutator.bounds`) changes a default for one command. Imports only the base and `ppo.config`.
"""

__all__ = ["calls", "episode", "evaluation", "learner", "models", "output", "questions"]
