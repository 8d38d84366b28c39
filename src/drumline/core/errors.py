"""The one error type meant for the person at the keyboard.

Anything a user can mend (a flag, a file, a folder, a machine setting) raises `UserError`; the command line
prints it without a traceback and exits with code 2. Our own broken invariants stay `AssertionError`s. As text, an
error holds nothing that steers a terminal, whatever names it quotes.
"""

from __future__ import annotations

from drumline.core.text import message


class UserError(ValueError):
    """What was wrong, where, and what to do about it, in one message."""

    exit_code = 2

    def __init__(self, what: str, fix: str = "") -> None:
        self.what, self.fix = what, fix
        super().__init__(message(f"{what}\n  fix: {fix}" if fix else what))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str]]:
        return type(self), (self.what, self.fix)


class LostError(UserError):
    """Something the run needs has gone: a loader process, an answer of another rank. Told like a user's mistake, but
    a fresh start may mend it, so the launcher restarts what it would otherwise end."""

    exit_code = 1
