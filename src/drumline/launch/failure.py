"""Why a process of the run ended, carried from the worker to the launcher, so that it is said once.

Promises: of many failures the cause is shown, not the broken connections that follow from it; a mistake the
user can mend comes without a traceback; a process killed by a signal is named with what usually does that.
The file is the one torch's launcher gives its workers, in its format, so torchrun understands it too.
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
from drumline.core.errors import LostError, UserError
from drumline.core.text import printable

FILE = "TORCHELASTIC_ERROR_FILE"

HINTS = {
    signal.SIGKILL: "out of memory? The kernel then kills the largest process: see `dmesg`, "
    "and try a smaller data.batch or fewer data.workers",
    signal.SIGBUS: "shared memory full, or a data file that was cut short or cannot be read? See `drumline doctor`; "
    "in Docker, start with --shm-size=8g",
    signal.SIGSEGV: "a crash in native code: run again with PYTHONFAULTHANDLER=1 to see where",
}

_LOST_PEER = re.compile(
    r"waited in vain for the other ranks|could not reach the other ranks"
    r"|closed by peer|reset by peer|broken pipe|connection refused|connection was likely closed"
    r"|remote process exited|remote server|communicator was aborted|timed out waiting"
    r"|collective operation timeout|failed to recv|wait timeout|socket timeout|no error message was returned",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """How one rank ended."""

    rank: int
    message: str
    time: float
    """By the monotonic clock of the machine that holds this value."""
    traceback: str = ""
    user: bool = False
    """A `UserError`: the message says what to do, a traceback would only hide it."""
    follows: bool = False
    """Lost contact with another rank: most likely the consequence of another failure."""
    exit_code: int = 1
    host: str = ""
    lost: bool = False
    """A `LostError` or a hang: a fresh start may mend it."""
    ends: bool = False
    """The run ends with it: it is not to be restarted."""


_SHAPE = Failure(rank=0, message="", time=0.0)


def record_failure(error: BaseException, rank: int) -> bool:
    """Leaves the error for whoever launched this worker. True when our launcher will show it, so that the
    worker should not print it too. Call it before leaving the process group: the others notice then."""
    path = os.environ.get(FILE)
    if not path:
        return False
    user, lost = isinstance(error, UserError), isinstance(error, LostError)
    message = printable(str(error) if user else f"{type(error).__name__}: {error}", keep="\n\t")
    stack = "" if user else printable("".join(traceback.format_exception(error)), keep="\n\t")
    failure = Failure(
        rank=rank,
        message=message,
        time=time.monotonic(),
        traceback=stack,
        user=user,
        follows=(not user or lost) and bool(_LOST_PEER.search(message)),
        exit_code=error.exit_code if isinstance(error, UserError) else 1,
        lost=lost,
    )
    torch_format = {
        "message": message,
        "extraInfo": {"py_callstack": stack, "timestamp": str(int(time.time()))},
    }
    draft = Path(path + ".draft")
    draft.write_text(json.dumps({"message": torch_format, "drumline": asdict(failure)}))
    draft.replace(path)
    return LAUNCHER in os.environ


def read_failure(path: str | Path) -> Failure | None:
    """What `record_failure` left in a file; None when it left nothing."""
    try:
        content = json.loads(Path(path).read_text())
    except FileNotFoundError:
        return None
    return Failure(**content["drumline"]) if "drumline" in content else None


def failure_from_exit(rank: int, code: int, now: float) -> Failure:
    """A rank that ended without a word: by a signal (negative code, as subprocess counts) or an exit code."""
    if code >= 0:
        return Failure(
            rank,
            f"ended with exit code {code} and left no message; see its output above",
            now,
            exit_code=code,
        )
    number = -code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = HINTS.get(signal.Signals(number)) if number in set(signal.Signals) else None
    # torch's NCCL watchdog aborts the process when a peer is gone, so an abort alone proves no cause.
    return Failure(
        rank, f"was killed by {name}" + (f" ({hint})" if hint else ""), now, follows=number == signal.SIGABRT
    )


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The failure the others follow from: the earliest that is not itself a lost connection."""
    return min(failures, key=lambda failure: (failure.follows, failure.time, failure.rank))


def on_host(failure: Failure, host: str) -> Failure:
    """The failure with its machine's name."""
    return replace(failure, host=host)


def from_fields(content: object) -> Failure:
    """A failure that came over a network: fields and types must be those of a `Failure`, else `ValueError`; what a
    terminal would obey is taken out, and a long text is cut."""
    kinds = {field.name: type(getattr(_SHAPE, field.name)) for field in fields(Failure)}
    if not isinstance(content, dict) or set(content) != set(kinds):
        raise ValueError("not a failure")
    if any(type(content[name]) is not kind for name, kind in kinds.items()):
        raise ValueError("a failure with a field of another type")
    if not math.isfinite(content["time"]):
        raise ValueError("a failure at no time")
    cleaned: dict[str, Any] = {
        name: plain(value) if isinstance(value, str) else value for name, value in content.items()
    }
    return Failure(**cleaned)


def plain(text: str) -> str:
    """Text without what would move a terminal's cursor or colour it, at most 20,000 characters."""
    return printable(text[:20_000], keep="\n\t")[:20_000]


def render_failure(failure: Failure) -> str:
    """What the user reads: rank, machine where there are several, message, and the traceback of our own
    mistakes."""
    where = who(failure)
    if failure.follows and failure.host and failure.traceback:
        # Between machines, a broken connection tells nothing but that: its traceback would name gloo or NCCL.
        return f"{summary(failure)} ({plain(failure.message).strip().splitlines()[0][:300]})"
    if failure.traceback:
        return f"{where} failed:\n{failure.traceback.rstrip()}"
    separator = " " if failure.message.startswith(("was ", "ended ", "lost ", "is ", "has ")) else ": "
    return f"{where}{separator}{failure.message}"


def summary(failure: Failure) -> str:
    """The same on one line."""
    if failure.follows and failure.traceback:
        return f"{who(failure)} lost contact with another process"
    if failure.traceback:
        return f"{who(failure)} failed ({failure.message.strip().splitlines()[0]})"
    return render_failure(failure).partition("\n")[0]


def who(failure: Failure) -> str:
    """The rank, and its machine where there are several."""
    if failure.rank < 0:
        return failure.host
    return f"rank {failure.rank}" + (f" on {failure.host}" if failure.host else "")
