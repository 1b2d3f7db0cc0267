"""The environment's inside: the task of a run, episodes, observations, and the scheduler of their model calls.

`task` has what all environments share; `episode` the rules, the attempts at one question and the policy's input;
`scheduling` runs steps, which are generators of calls, without a barrier; `engine` decides what an action does and what
a caller receives; `vector` is what gymnasium asks of a vector of environments.
`QueryMutationEnv` itself is in `rl_query_mutator_env.py`.
"""

__all__ = ["engine", "episode", "scheduling", "task", "vector"]
