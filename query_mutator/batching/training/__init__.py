"""Supervised fine-tuning of a causal language model on batches that the toolkit planned: `qm train sft`.

    flags -> rows of tokens -> source (plan, stream, gym) -> steps -> checkpoints, model/

`config` has the flags, `trainer.train` runs them. Only `config` is light; the others load torch.
"""

__all__: list[str] = []
