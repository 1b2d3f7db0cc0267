"""The terminal: flags from dataclasses, and what a command line prints.

`flags` turns a dataclass into a parser with one-line errors; `console` has exit codes, signals, progress bars and
tables. Every command line imports from these two modules; they import only `errors`, `files` and `registry`.
"""

__all__ = ["console", "flags"]
