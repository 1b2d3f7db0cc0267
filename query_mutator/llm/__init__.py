"""Calls to model servers: a pooled transport, one backend a file, wrappers around it, and how they are composed."""
