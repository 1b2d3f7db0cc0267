"""The terminal: flags from dataclasses, and what a command line prints.

`flags` turns a dataclass into a parser with one-line errors, and reads files of flags; `outputs` checks the files that
a command writes; `console` has exit codes, signals, progress bars and tables; `registry` lists the commands of `qm`.
"""

__all__ = ["console", "flags", "outputs", "registry"]
