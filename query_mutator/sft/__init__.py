"""Supervised fine-tuning of a causal language model on batches that the toolkit planned: `qm train sft`.

    flags -> rows of tokens -> source (plan, stream, gym) -> steps -> checkpoints, model/

W ranks, A microbatches a rank and step, R rows, L tokens a row.
"""
