"""Callbacks: what hangs on the training loop without being part of it, ours and those of `--plugin`.

base.py           Callback, its hooks, RunView (what a hook sees), CALLBACKS (the registry) and CallbackList
advice.py         the server works on fewer calls at a time than it is sent
failures.py       stop when too many calls fail
judge_watch.py    does the judge's score rise while what the gold says does not?
long_prompts.py   prompts that do not fit a model's context
validation.py     periodic evaluations on validation questions
"""

from query_mutator.training.callbacks.base import CALLBACKS, Callback, CallbackList, RunView

__all__ = ["CALLBACKS", "Callback", "CallbackList", "RunView"]
