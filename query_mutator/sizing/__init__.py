"""Sizes before a run: memory of a training step without a GPU, calls in flight, environments."""
