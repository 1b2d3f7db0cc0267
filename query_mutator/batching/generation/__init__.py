"""Data that is computed once and read often: token lengths, token rows, batch stores.

Offers LengthCache, RowTokenizer and JsonlSamples (rows of a JSONL file as tokens), BatchWriter and BatchReader, and
collation into rectangular batches. Imports `planning` and `core`.
"""

__all__ = ["collate", "io", "jsonl", "length_cache", "rows", "token_store"]
