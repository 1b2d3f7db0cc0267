"""What is made once and read often: the lengths of a data set."""

from query_mutator.batching.generation.length_cache import LengthCache, LengthEntry

__all__ = ["LengthCache", "LengthEntry"]
