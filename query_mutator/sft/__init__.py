"""Supervised fine-tuning of a causal language model on batches that the toolkit planned: `qm train sft`.

    flags -> rows of tokens -> source (plan, stream, gym) -> steps -> checkpoints, model/

`config` has the flags, `trainer.train` runs them; `distill` turns a run's transcripts into rows for it (`qm data
export`). Only `config` and `distill` are light; the others load torch. W ranks, A microbatches per rank and step.
"""

__all__: list[str] = []
