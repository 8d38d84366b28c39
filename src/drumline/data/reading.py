"""Reads whole files, within limits, and retries while the system fails.

A sample can fail in two ways. Its *content* is wrong (too large, truncated, not an image): that is the same in every
run, so it is a `UserError`, and a substitute takes its place. Or the *system* fails (a disk, a network file system,
no free descriptor or memory, a file that is gone since the data was opened): that says nothing about the sample, and
a substitute would change the run's bits. So the read is retried for some seconds and then is a `LostError`: the
process ends, and the launcher restarts it.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TypeVar

from drumline.core.errors import LostError, UserError
from drumline.data.image.decode import check_bytes, too_large

PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 3.2)
"""Seconds between tries."""
LONGER = (5.0,) * 10
"""Further pauses of a restarted run that waits for its data, which saves restarts."""
USERS = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)
)
"""Errors of a wrong path or missing permission, when data is opened for the first time."""
_ADVICE = {
    errno.EMFILE: "raise the limit of open files: `ulimit -n 65536`",
    errno.ENFILE: "the whole machine has too many files open: close other programs",
    errno.ENOMEM: "try fewer data.workers or a smaller data.batch",
    errno.EACCES: "check its permissions, and that the file system is still mounted",
    errno.ENOENT: "restore the file, or check that the disk is still mounted",
}

Result = TypeVar("Result")


class NotRegular(UserError):
    """Something without content of its own where a file should be."""


def not_regular(path: str | os.PathLike[str], mode: int) -> NotRegular:
    """The error for a pipe, a device, or the like."""
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
    kind = kinds.get(stat.S_IFMT(mode), "a device")
    linked = "a link to " if Path(path).is_symlink() else ""
    return NotRegular(f"{os.fspath(path)} is {linked}{kind}, not a regular file", "remove it from the data")


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Opens a file to read. Rejects pipes, devices and folders, for which `open` would wait or read without end."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(file).st_mode
        if not stat.S_ISREG(mode):
            raise not_regular(path, mode)
        return FileIO(file, "rb")
    except BaseException:
        os.close(file)
        raise


def read_whole(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """The bytes of a regular file, of which there may be `most` (`limits.MAX_BYTES` unless given)."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        _check_size(size, path, most)
        # A byte more than it should hold: what grows, or has no size of its own, is read on in pieces.
        parts, held = [_some(stream, size + 1, path)], 0
        while parts[-1]:
            held += len(parts[-1])
            _check_size(held, path, most)
            parts.append(_some(stream, 1 << 20, path))
        return parts[0] if len(parts) <= 2 else b"".join(parts)


def _some(stream: FileIO, most: int, path: str | os.PathLike[str]) -> bytes:
    """Reads up to `most` bytes. Rejects a kernel file that has no content yet, because reading it would block."""
    part: bytes | None = stream.read(most)
    if part is None:
        raise NotRegular(
            f"{os.fspath(path)} has no content yet: reading it would block", "remove it from the data"
        )
    return part


def patiently(act: Callable[[], Result], what: str) -> Result:
    """The result of `act`, which is retried while the system fails. Finally raises a `LostError` that names
    `what`."""
    global _lost_before
    pauses = PAUSES[:2] if _lost_before else PAUSES
    for pause in (*pauses, None):
        try:
            return act()
        except (OSError, MemoryError) as error:
            if pause is None:
                _lost_before = True
                raise lost(what, error, pauses) from error
        time.sleep(pause)
    raise AssertionError


_lost_before = False
"""Whether a read was lost. Only `drumline verify` continues then, and waits less for each further file."""


def patiently_opened(
    act: Callable[[], Result], path: str, again: bool, longer: tuple[float, ...] = ()
) -> Result:
    """The data that `act` opens. With `again`, this run has opened it before, so any error is a loss. The first time,
    a mistake of the user is reported at once."""
    for pause in (*PAUSES, *longer, None):
        try:
            return act()
        except OSError as error:
            failure = open_error(path, error)
        except UserError as error:
            failure = error
        if not again and not isinstance(failure, LostError):
            raise failure
        if pause is None:
            raise LostError(failure.what, failure.fix) from failure
        time.sleep(pause)
    raise AssertionError


def open_error(path: str | os.PathLike[str], error: OSError, fix: str = "") -> UserError:
    """The error for a file or folder of the data that cannot be opened: a wrong path, or a loss."""
    name = os.fspath(path)
    if isinstance(error, FileNotFoundError):
        return UserError(f"{name} does not exist", fix or "check data.path, and that the disk is mounted")
    if isinstance(error, PermissionError):
        return UserError(f"no permission to read {name}", fix or f"chmod -R u+rX {name}, or ask its owner")
    if error.errno in USERS:
        return UserError(f"{name} cannot be read: {error.strerror}", fix or "check data.path")
    return lost(name, error)


def lost(what: str, error: OSError | MemoryError, pauses: tuple[float, ...] = ()) -> LostError:
    """A failure of the system as an error."""
    code = errno.ENOMEM if isinstance(error, MemoryError) else error.errno
    reason = os.strerror(code) if code else str(error)
    often = f" ({len(pauses) + 1} tries in {sum(pauses):.1f} s)" if pauses else ""
    advice = _ADVICE.get(code or 0, "check the disk or the network file system")
    return LostError(
        f"{what} cannot be read: {reason}{often}", f"{advice}; then continue with --checkpoint.resume auto"
    )


def _check_size(size: int, path: str | os.PathLike[str], most: int | None) -> None:
    if most is None:
        check_bytes(size, os.fspath(path))
    elif size > most:
        raise too_large(os.fspath(path), f"is too large: {size:,} bytes (the limit is {most:,})")
