"""The files of a run: its folder, its metrics, and where it came from.

`run_dir` creates the folder and writes config, transcripts and summary; `metrics` reads `metrics.tsv`, the list of
every metric key, and writes `metrics.jsonl`; `run_log` computes the `charts/`, `llm/` and `counters/` of a row;
`json_lines` has the files of rows, `provenance` versions, commit and hardware. The keys of `losses/` come from the
learner's `update`. `state` says whether a run is running, finished, interrupted or killed, `listing` lists the runs in
a folder, `pairs` compares evaluations question by question. `tracking` starts a process for each experiment tracker, in
which `follow` reads the run folder and `trackers` writes to wandb, trackio or MLflow.
"""

__all__ = ["json_lines", "listing", "metrics", "pairs", "provenance", "run_dir", "run_log", "state", "tracking"]
