"""The page of a run: what it learned, as one self-contained HTML file. Never imports torch.

A page is a list of messages, applied in order by the JavaScript of `assets/`; `messages` describes them and removes
secrets. `run_reader` turns the rows of a run folder into messages, `build` writes the file, and `watch`
serves the pages of a folder of runs. The sections: `results` (the comparison with the baselines), `usage` (what the
policy does), `figures` (learning, calls and their cost). `questions`
has the rows of an evaluation, also of run next to run.

Imports stats, cli, runs, rewards, data, the HTML page of lab.analysis, and the pure functions of evaluation.
"""

__all__ = ["build", "messages", "run_reader", "watch"]
