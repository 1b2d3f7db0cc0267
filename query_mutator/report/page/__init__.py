"""The page of a run: what it learned, as one self-contained HTML file, or live in a browser. Never imports torch.

A page is a list of messages, applied in order by the JavaScript of `assets/`; `messages` describes them. `tail` reads
the rows that are new in a file, `run_reader` turns a run folder into messages, `build` writes the file, and `live`
serves it during a run. The sections: `results` (the comparison with the baselines), `usage` (what the policy does),
`figures` (learning and calls), `cost` (at given prices), `traffic` (real questions, answered both ways), `origin` (how
to repeat the run), `pairs` (run next to run). `questions` has the rows of an evaluation, `rows` checks them.

Imports stats, cli, runs, rewards, data, the HTML page of lab.analysis, and the pure functions of evaluation.
"""

__all__ = ["build", "live", "messages", "run_reader"]
