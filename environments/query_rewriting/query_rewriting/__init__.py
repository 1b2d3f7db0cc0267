"""A v1 environment of the package `verifiers`: a language model rewrites questions for another model.

taskset.py   the questions, with Query Mutator's reward
harness.py   the policy is a language model; `query_rewriting_replay` is the harness of a saved policy
env.py       closes the target when a run ends
"""

from query_rewriting.env import QueryRewritingEnv, load_environment
from query_rewriting.harness import QueryRewritingHarness
from query_rewriting.taskset import QueryRewritingTaskset

__all__ = ["QueryRewritingEnv", "QueryRewritingHarness", "QueryRewritingTaskset", "load_environment"]
