"""The error type for mistakes that the user can fix.

Anything a user can fix (a flag, a file, a folder, a machine setting) raises `UserError`. The command line prints it
without a traceback and exits with code 2. A broken invariant of our own code is an `AssertionError`. The text of an
error contains no terminal control characters, whatever names it quotes.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from drumline.core.text import message

KILLED = 128 + signal.SIGKILL
"""Exit code of a process that ended, or of a launcher that killed its workers, before the run was saved."""


class UserError(ValueError):
    """What is wrong and where (`what`), what to do about it (`fix`), and a stable name for programs (`code`).

    Code that needs to know which error it caught compares `code`, a short kebab-case word such as `bad-checksum`.
    The wording of `what` and `fix` may change at any time.
    """

    exit_code = 2

    def __init__(self, what: str, fix: str = "", code: str = "") -> None:
        self.what, self.fix, self.code = what, fix, code
        super().__init__(message(f"{what}\n  fix: {fix}" if fix else what))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        return type(self), (self.what, self.fix, self.code)


PEER_LOST = "peer-lost"
"""The code of an error that most likely follows from the failure of another rank."""


class LostError(UserError):
    """The run lost something it needs, such as a loader process or the reply of another rank. It is printed like
    any `UserError`, but a fresh start may succeed, so the launcher restarts the run."""

    exit_code = 1


def combined(errors: Sequence[UserError]) -> UserError:
    """Several errors as one, each with its own fix."""
    return errors[0] if len(errors) == 1 else UserError("\n".join(map(str, errors)), code="several")
