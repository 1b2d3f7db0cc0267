"""Samples and pairs of preferences as records, their files, and the fingerprint of a data set: all in `schema`."""

__all__ = ["schema"]
