"""Why a process of the run ended, passed from the worker to the launcher, so that it is shown once.

Promises: of many failures the cause is shown, not the broken connections that follow from it; a mistake that the user
can fix is shown without a traceback; a process killed by a signal is reported with the usual reason for that signal.
The error file is the one that torch's launcher gives its workers, in its format, so torchrun can read it too.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from drumline.core.environment import LAUNCHER
from drumline.core.errors import PEER_LOST, LostError, UserError
from drumline.core.text import printable

FILE = "TORCHELASTIC_ERROR_FILE"

HINTS = {
    signal.SIGKILL: "out of memory? The kernel then kills the largest process: see `dmesg`, "
    "and try a smaller data.batch or fewer data.workers",
    signal.SIGBUS: "shared memory full, or a data file that was truncated or cannot be read? See `drumline doctor`; "
    "in Docker, start with --shm-size=8g",
    signal.SIGSEGV: "a crash in native code: run again with PYTHONFAULTHANDLER=1 to see where",
}

_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|connection was likely closed"
    r"|remote process exited|remote server|communicator was aborted|timed out waiting"
    r"|collective operation timeout|failed to recv|wait timeout|socket timeout|no error message was returned",
    re.IGNORECASE,
)
"""How gloo, NCCL and torch's stores word a lost connection; they raise plain RuntimeErrors for it."""


@dataclass(frozen=True)
class Failure:
    """How one rank ended."""

    rank: int
    """-1: the failure concerns a machine, not a rank."""
    message: str
    time: float
    """By the monotonic clock of the machine that holds this value."""
    fix: str = ""
    """What to do about a `UserError`."""
    traceback: str = ""
    user: bool = False
    """A `UserError`: the message says what to do, so no traceback is shown."""
    code: str = ""
    """The `code` of a `UserError`."""
    follows: bool = False
    """The rank lost contact with another one: most likely a consequence of another failure."""
    exit_code: int = 1
    host: str = ""
    lost: bool = False
    """A `LostError` or a hang: a restart may succeed."""
    ends: bool = False
    """The run ends with this failure; it is not restarted."""


_EXAMPLE = Failure(rank=0, message="", time=0.0)


def record_failure(error: BaseException, rank: int) -> bool:
    """Writes the error for the launcher of this worker. True if our launcher shows it, so that the worker does not
    print it too. Call it before leaving the process group: the other ranks notice that."""
    path = os.environ.get(FILE)
    if not path:
        return False
    now = time.monotonic()
    if isinstance(error, UserError):
        failure = Failure(
            rank,
            printable(error.what, keep="\n\t"),
            now,
            fix=printable(error.fix, keep="\n\t"),
            user=True,
            code=error.code,
            follows=error.code == PEER_LOST,
            exit_code=error.exit_code,
            lost=isinstance(error, LostError),
        )
    else:
        text = printable(f"{type(error).__name__}: {error}", keep="\n\t")
        stack = printable("".join(traceback.format_exception(error)), keep="\n\t")
        failure = Failure(rank, text, now, traceback=stack, follows=bool(_LOST_PEER.search(text)))
    torch_format = {
        "message": f"{failure.message}\n{failure.fix}".strip(),
        "extraInfo": {"py_callstack": failure.traceback, "timestamp": str(int(time.time()))},
    }
    draft = Path(path + ".draft")
    draft.write_text(json.dumps({"message": torch_format, "drumline": asdict(failure)}))
    draft.replace(path)
    return LAUNCHER in os.environ


def read_failure(path: str | Path) -> Failure | None:
    """The failure that `record_failure` wrote to a file; None if there is none."""
    try:
        content = json.loads(Path(path).read_text())
    except FileNotFoundError:
        return None
    return Failure(**content["drumline"]) if "drumline" in content else None


def failure_from_exit(rank: int, code: int, now: float) -> Failure:
    """A rank that ended without an error file: by a signal (negative code, as in subprocess) or an exit code."""
    if code >= 0:
        return Failure(
            rank, f"exit code {code} and no error message; see its output above", now, exit_code=code
        )
    number = -code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = HINTS.get(signal.Signals(number)) if number in set(signal.Signals) else None
    # torch's NCCL watchdog aborts the process when a peer is gone, so an abort alone proves no cause.
    return Failure(
        rank, f"killed by {name}" + (f" ({hint})" if hint else ""), now, follows=number == signal.SIGABRT
    )


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that caused the others: the earliest that is not itself a lost connection."""
    return min(failures, key=lambda failure: (failure.follows, failure.time, failure.rank))


def on_host(failure: Failure, host: str) -> Failure:
    """The failure with the name of its machine."""
    return replace(failure, host=host)


def from_fields(content: object) -> Failure:
    """A failure received over a network. Raises `ValueError` unless fields and types are those of a `Failure`. Strips
    terminal control characters and truncates long text."""
    kinds = {field.name: type(getattr(_EXAMPLE, field.name)) for field in fields(Failure)}
    if not isinstance(content, dict) or set(content) != set(kinds):
        raise ValueError("not a failure")
    if any(type(content[name]) is not kind for name, kind in kinds.items()):
        raise ValueError("a failure with a field of the wrong type")
    if not math.isfinite(content["time"]):
        raise ValueError("a failure without a valid time")
    cleaned: dict[str, Any] = {
        name: plain(value) if isinstance(value, str) else value for name, value in content.items()
    }
    return Failure(**cleaned)


def plain(text: str) -> str:
    """Text without terminal control characters, at most 20,000 characters."""
    return printable(text[:20_000], keep="\n\t")[:20_000]


def render_failure(failure: Failure) -> str:
    """The failure for the user: rank, machine if there are several, message, and the traceback of an unexpected
    error."""
    if failure.follows and failure.host and failure.traceback:
        # Between machines, a broken connection says only that: its traceback would name gloo or NCCL.
        return f"{summary(failure)} ({plain(failure.message).strip().splitlines()[0][:300]})"
    if failure.traceback:
        return f"{rank_name(failure)} failed:\n{failure.traceback.rstrip()}"
    return f"{rank_name(failure)}: {failure.message}" + (f"\n  fix: {failure.fix}" if failure.fix else "")


def summary(failure: Failure) -> str:
    """The failure in one line."""
    if failure.follows and failure.traceback:
        return f"{rank_name(failure)} lost contact with another process"
    if failure.traceback:
        return f"{rank_name(failure)} failed ({failure.message.strip().splitlines()[0]})"
    return render_failure(failure).partition("\n")[0]


def rank_name(failure: Failure) -> str:
    """The rank, and its machine if there are several."""
    if failure.rank < 0:
        return failure.host
    return f"rank {failure.rank}" + (f" on {failure.host}" if failure.host else "")
