"""The tree of errors.

    QueryMutatorError
    ├── UsageError (also a ValueError)   something a user typed or a file they gave        exit code 2
    │   ├── DatasetError                 a row of a question file, with file and line
    │   ├── CheckpointError              unreadable, or made for other settings
    │   ├── EncoderError                 an encoder that cannot be found or verified
    │   └── BatchFileError               a truncated, edited or mixed-up file (batching/files.py)
    ├── BackendError                     a server that cannot serve this run at all        exit code 2
    │   ├── ServerDownError              nothing answers at the address
    │   ├── ServerBusyError              the server asks to come back later, as while it loads a model
    │   └── ModelMissingError            the server answers, the model is not there
    ├── DiskError                        a file of the run could not be written            exit code 2
    └── TooManyFailuresError             calls failed more often than allowed              exit code 3

A single failed call is not in this tree: it is data (`types.ErrorInfo`), because the run continues.
"""

from __future__ import annotations

EXIT_USAGE = 2
EXIT_FAILURES = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class QueryMutatorError(Exception):
    """Base of all errors; `str(error)` is one line that says what to do, `exit_code` is for command lines."""

    exit_code = EXIT_USAGE


class UsageError(QueryMutatorError, ValueError):
    """A flag, argument or file of the user is invalid."""


class DatasetError(UsageError):
    """A row of a question file is invalid; the message starts with `file:line:`."""


class CheckpointError(UsageError):
    """A checkpoint cannot be read, or was made for other settings."""


class EncoderError(UsageError):
    """A sentence encoder cannot be found, or its weights are not the ones expected."""


class BackendError(QueryMutatorError):
    """A model server cannot serve this run; `kind` is that of the failed call (`types.ERROR_KINDS`), if one failed."""

    def __init__(self, message: str, *, kind: str = "server") -> None:
        super().__init__(message)
        self.kind = kind


class ServerDownError(BackendError):
    """Nothing answers at the server's address."""


class ServerBusyError(BackendError):
    """The server answers that it cannot serve now."""


class ModelMissingError(BackendError):
    """The server answers, but does not have the model."""


class DiskError(QueryMutatorError):
    """A file of the run could not be written (a full disk, a read-only folder)."""


class TooManyFailuresError(QueryMutatorError):
    """More calls failed than the run allows."""

    exit_code = EXIT_FAILURES
