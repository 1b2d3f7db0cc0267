"""The exit codes of commands are frozen: by error, and by how else a command ends."""

from __future__ import annotations

import pytest

from query_mutator import errors
from query_mutator.cli.console import Interrupted, exit_code

CODES: dict[BaseException, int] = {
    errors.QueryMutatorError("x"): 2,
    errors.UsageError("x"): 2,
    errors.KeywordError("x"): 2,
    errors.DatasetError("x"): 2,
    errors.CheckpointError("x"): 2,
    errors.EncoderError("x"): 2,
    errors.UnnamedError("x"): 2,
    errors.BackendError("x"): 2,
    errors.TooFewAnswersError("x"): 2,
    errors.ServerDownError("x"): 2,
    errors.ModelMissingError("x"): 2,
    errors.DiskError("x"): 2,
    errors.TooManyFailuresError("x"): 3,
    MemoryError(): 2,
    KeyboardInterrupt(): 130,
    Interrupted(errors.EXIT_INTERRUPTED): 130,
    Interrupted(errors.EXIT_TERMINATED): 143,
    BrokenPipeError(): 141,
}


@pytest.mark.parametrize(("error", "code"), CODES.items(), ids=lambda case: type(case).__name__)
def test_a_command_ends_with_the_code_of_its_error(error: BaseException, code: int) -> None:
    def command(argv: object) -> int:
        raise error

    assert exit_code(command, [], prog="qm") == code


def test_every_error_has_a_recorded_code() -> None:
    known = {
        one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.QueryMutatorError)
    }
    assert known == {type(error) for error in CODES if isinstance(error, errors.QueryMutatorError)}
