"""Exit codes, and which error gets which."""

import sys
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every verb. ``wait`` returns the job's own exit code when the job has ended."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    REFUSED = 4
    TIMED_OUT = 5
    UNMET = 6
    UNREACHABLE = 7


class CommandError(Exception):
    """Ends the command with a message and an exit code."""

    def __init__(self, message: str, code: Exit = Exit.FAILED) -> None:
        """Keep the exit code."""
        super().__init__(message)
        self.code = code


_CODES = {
    "ApiUnreachableError": Exit.UNREACHABLE,
    "StoreUnavailable": Exit.UNREACHABLE,
    "CommitUnknown": Exit.UNREACHABLE,
    "EmbeddedUnavailable": Exit.UNREACHABLE,
    "WrongCluster": Exit.REFUSED,
    "SchemaNewer": Exit.REFUSED,
    "LocalError": Exit.FAILED,
    "ValidationError": Exit.USAGE,
}


def report(error: Exception) -> int:
    """Print the error in one line and return its exit code. Unknown errors are raised on: they are defects."""
    if isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, CommandError):
        code: int = error.code
    elif type(error).__name__ == "ApiError":
        code = {404: Exit.NOT_FOUND}.get(getattr(error, "status", 0), Exit.REFUSED)
    elif type(error).__name__ in _CODES:
        code = _CODES[type(error).__name__]
    else:
        raise error
    sys.stderr.write(f"queuectl: {error}\n")
    return code
