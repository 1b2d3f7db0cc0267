"""The tree of errors.

    QueryMutatorError
    ├── UsageError (also a ValueError)   something a user typed or a file they gave        exit code 2
    │   ├── KeywordError (also a TypeError)  an unknown keyword argument of an environment
    │   ├── DatasetError                 a row of a question file, with file and line
    │   ├── CheckpointError              unreadable, or made for other settings
    │   ├── TooFewAnswersError           to learn P(right) from
    │   └── EncoderError                 an encoder that cannot be found or verified
    ├── BackendError                     a server that cannot serve this run at all        exit code 2
    │   ├── ServerDownError              nothing answers at the address
    │   └── ModelMissingError            the server answers, the model is not there
    ├── DiskError                        a file of the run could not be written            exit code 2
    └── TooManyFailuresError             calls failed more often than allowed              exit code 3

A single failed call is not in this tree: it is data (`types.ErrorInfo`), because the run continues.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

EXIT_USAGE = 2
EXIT_FAILURES = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.EEXIST}
_CLOSED |= {errno.ENAMETOOLONG, errno.ELOOP}

HIDDEN = "***"
_CREDENTIALS = re.compile(
    r"(?P<before>//)[^/\s@'\"]+(?=@)"  # user:password@host
    r"|(?P<name>[?&][\w.-]{0,40}(key|token|secret|password|auth|sig)[\w.-]{0,40}=)[^&\s'\"#]+",
    re.IGNORECASE,
)


def hide_credentials(text: str) -> str:
    """Return `text` without the credentials in its URLs: user and password, and parameters named as secrets."""
    return _CREDENTIALS.sub(lambda match: f"{match['before'] or match['name']}{HIDDEN}", text)


def reason_of(error: BaseException) -> str:
    """Return the first line of what a library says, without PyTorch's advice to run the code in a file after all."""
    text = str(error).strip()
    if re.search("weights[_ ]only", text, re.IGNORECASE):
        return "it holds Python objects, which may run code; only tensors are read"
    return text.partition("\n")[0] or type(error).__name__


class QueryMutatorError(Exception):
    """Base of all errors; `str(error)` is one line that says what to do, `exit_code` is for command lines."""

    exit_code = EXIT_USAGE


class UsageError(QueryMutatorError, ValueError):
    """A flag, argument or file of the user is invalid."""


class KeywordError(UsageError, TypeError):
    """A keyword argument is unknown; a TypeError, as Python raises, because torchrl's GymEnv tries keywords."""


class DatasetError(UsageError):
    """A row of a question file is invalid; the message starts with `file:line:`, `rows` has those of the first rows."""

    def __init__(self, message: str, *, rows: Sequence[str] = (), count: int = 0) -> None:
        super().__init__(message)
        self.rows, self.count = rows, count  # of all invalid rows, where they were read on


class CheckpointError(UsageError):
    """A checkpoint cannot be read, or was made for other settings."""


class TooFewAnswersError(UsageError):
    """Too few graded answers to learn P(right) from."""


class EncoderError(UsageError):
    """A sentence encoder cannot be found, or its weights are not the ones expected."""


class BackendError(QueryMutatorError):
    """A model server cannot serve this run; `kind` is that of the failed call (`types.ERROR_KINDS`), if one failed."""

    def __init__(self, message: str, *, kind: str = "server") -> None:
        super().__init__(message)
        self.kind = kind


class ServerDownError(BackendError):
    """Nothing answers at the server's address."""


class ModelMissingError(BackendError):
    """The server answers, but does not have the model."""


class DiskError(QueryMutatorError):
    """A file of the run could not be written (a full disk, a read-only folder)."""


class TooManyFailuresError(QueryMutatorError):
    """More calls failed than the run allows."""

    exit_code = EXIT_FAILURES


def disk_advice(error: OSError) -> str | None:
    """Return what to do about a file that cannot be written or opened, None for errors of another kind."""
    if error.errno in TOO_MANY_FILES:
        return f"{error.strerror}; allow more with `ulimit -n`, or make fewer calls at once (--batch-size)"
    place = f"{error.filename}: " if error.filename else ""
    if error.errno in _FULL:
        return f"{place}the disk is full ({error.strerror}); free some space, or choose another place to write to"
    if error.errno in _CLOSED:
        return f"{place}cannot be written ({error.strerror}); choose another place to write to"
    return None


@contextmanager
def disk_errors(path: object) -> Iterator[None]:
    """Turn the operating system's refusal to write `path` into a DiskError."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        advice = disk_advice(error)
        if advice is None:
            raise
        raise DiskError(advice) from error
