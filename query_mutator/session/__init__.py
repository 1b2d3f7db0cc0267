"""The waist between learning and serving: open the models, make the task, read a policy, play episodes.

    models.py        open_models: server, client and encoder of a run
    task.py          make_task: questions and their split, the reward and its judge, the rules of an episode
    policy_file.py   the policy and what acting needs in addition to the weights, in one file; from it to a task
    play.py          play(policy, engine): the one loop over the steps of an episode

It may import `learners` and all below it.
"""

__all__ = ["models", "play", "policy_file", "task"]
