"""The waist between learning and serving: open the models, make the task, read a policy, play episodes.

    models.py        open_models: server, client and encoder of a run
    shared_models.py the models of `gymnasium.make`, once per process
    task.py          make_task: its questions and the rules of an episode
    dataset.py       the questions and their split
    trust.py         what a saved policy may use: what this user named
    judging.py       the reward, and the judge in it
    checkpoint.py    the state of a training; policy_file.py the policy alone, in one file
    background.py    what acting needs in addition to the weights
    loading.py       from a run folder or a policy file to a task against running models
    play.py          play(policy, engine): the one loop over the steps of an episode

It may import `learners` and all below it.
"""

__all__ = ["background", "checkpoint", "dataset", "judging", "loading", "models", "policy_file", "task"]
