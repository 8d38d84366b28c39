"""Locks: `exclusive` for a lock file, and `acquire` for a run folder, whose ownership is checked before each write.

The kernel's lock (flock on `.lock`) ends with its process, however that ends, but a process that is frozen or cut off
keeps it. So the file of a run folder names its owner: the launch, and its generation, which rises with restarts.
Promises: a later generation of the same launch takes over a folder at once, by replacing the lock file. When the
earlier one runs again, it finds out before its next write and ends without changing anything. If a run folder is
renamed or deleted, its run ends and writes nothing under the old name. While the owner lives, any other run is
rejected.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from drumline.core.environment import GENERATION, LAUNCH_ID
from drumline.core.errors import LostError, UserError
from drumline.core.text import printable

FILE = ".lock"
TRIES = 100
"""How often to try a lock file that other processes keep replacing."""
PAUSES = (0.01, 0.02, 0.04)
"""Seconds between tries of a lock that is taken."""
_READ = 4096
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Superseded(LostError):
    """The run folder belongs to a later start of the run, or was moved or deleted."""


@dataclass(frozen=True)
class Owner:
    """The process that writes a run folder."""

    launch: str
    """Empty for a run that our launcher did not start; its folder is never taken over."""
    generation: int
    host: str
    pid: int
    token: str
    """Distinguishes two owners in one process."""

    def precedes(self, other: Owner) -> bool:
        """Whether this is an earlier start of the same launch."""
        return bool(self.launch) and self.launch == other.launch and self.generation < other.generation


class Lock:
    """The lock of a run folder, held until it is closed or the process ends."""

    def __init__(self, folder: Path, owner: Owner, descriptor: int) -> None:
        self.folder, self.owner = folder, owner
        self.replaced: Owner | None = None
        """The earlier start that this one took over from."""
        self._descriptor = descriptor
        self._busy = threading.RLock()  # a signal handler may call `check` while its thread does
        _held[folder] = self

    @property
    def closed(self) -> bool:
        return self._descriptor < 0

    def fileno(self) -> int:
        return self._descriptor

    def check(self) -> None:
        """Raises `Superseded` unless the folder still belongs to this owner. Costs one open and one read."""
        with self._busy:
            if self.closed:
                return
            try:
                # Opened each time: that makes a network file system check its server.
                found = _parse((self.folder / FILE).read_bytes()[:_READ])
            except (FileNotFoundError, NotADirectoryError):
                raise self._displaced() from None
            if found == self.owner:
                return
            if found is not None and found.precedes(self.owner):
                self._put()  # that owner was frozen while it took over from an even earlier one
                return
            raise _superseded(self.folder, found)

    def close(self) -> None:
        """Releases the lock."""
        with self._busy:
            if not self.closed:
                os.close(self._descriptor)
                self._descriptor = -1
            if _held.get(self.folder) is self:
                del _held[self.folder]

    def _put(self) -> None:
        """Replaces the lock file by a locked one that names this owner."""
        draft = self.folder / f"{FILE}.{self.owner.token}.tmp"
        descriptor = os.open(draft, _FLAGS | os.O_EXCL, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(descriptor, self.owner)
            draft.rename(self.folder / FILE)
        except BaseException:
            os.close(descriptor)
            draft.unlink(missing_ok=True)
            raise
        if not self.closed:
            os.close(self._descriptor)
        self._descriptor = descriptor

    def _displaced(self) -> Superseded:
        """The error that says what happened to the folder, as far as the kernel knows."""
        now = ""
        with suppress(OSError):
            now = str(Path(f"/proc/self/fd/{self._descriptor}").readlink().parent)
        if now and Path(now, FILE).exists():
            return Superseded(
                f"{self.folder} was moved to {now} while the run was writing it; nothing was written since",
                f"resume with `drumline resume {now}`",
            )
        if self.folder.is_dir():
            return Superseded(
                f"{self.folder / FILE} was deleted while the run was writing the folder; nothing was written since",
                "resume with --checkpoint.resume auto, and do not delete that file",
            )
        return Superseded(
            f"{self.folder} was deleted while the run was writing it",
            "start the run again, or restore the folder",
        )


def acquire(folder: Path) -> Lock:
    """Locks a run folder, and creates it if it is missing. Raises a `UserError`, or OSError."""
    owner = _owner(os.environ)
    for _ in range(TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder / FILE, _FLAGS, 0o666)
        except FileNotFoundError:
            continue  # a run that never used the folder has just removed it
        before = _parse(os.pread(descriptor, _READ, 0))
        if before is not None and owner.precedes(before):
            os.close(descriptor)
            raise _superseded(folder, before)
        if before is not None and before.precedes(owner):
            os.close(descriptor)
            lock = Lock(folder, owner, -1)
            try:
                lock._put()
            except BaseException:
                lock.close()
                raise
            lock.replaced = before
            return lock
        try:
            _lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise _not_locked(folder, error, before) from error
        # A file that another run has removed since it was opened locks nothing.
        if _is_linked(descriptor, folder / FILE):
            try:
                _write(descriptor, owner)
            except BaseException:
                os.close(descriptor)
                raise
            return Lock(folder, owner, descriptor)
        os.close(descriptor)
    raise _not_locked(folder, OSError(errno.ENOLCK, "the lock file keeps changing"), None)


def _lock(descriptor: int) -> None:
    """Locks the file of a run folder. Raises OSError while another run holds it. `is_held` holds it for microseconds,
    so a lock that is taken is tried again."""
    for pause in PAUSES:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(pause)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def exclusive(file: Path, held: UserError) -> Iterator[None]:
    """Holds a lock file, also against other machines that share its folder, and deletes it at the end. A file that a
    killed process left locks nothing. Raises `held` while another process holds the lock, or OSError."""
    while True:
        descriptor = os.open(file, _FLAGS, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before deletes its file at the end: a file that was opened until then locks nothing.
            if _is_linked(descriptor, file):
                break
        except BlockingIOError:
            os.close(descriptor)
            raise held from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # while it is locked: later, it could be the next holder's
        os.close(descriptor)


def check(path: Path) -> None:
    """Call before writing, renaming or deleting a path. Raises `Superseded` if the path is in a run folder that this
    process has locked and that is no longer its own."""
    for folder, lock in tuple(_held.items()):
        if folder == path or folder in path.parents:
            lock.check()


def is_past(folder: Path, launch: str, generation: int) -> bool:
    """Whether a later generation of a launch has taken over a folder. For launchers, which hold no lock."""
    try:
        owner = _parse((folder / FILE).read_bytes()[:_READ])
    except OSError:
        return False
    return owner is not None and bool(launch) and owner.launch == launch and generation < owner.generation


def is_held(folder: Path) -> bool:
    """Whether a process holds the lock of a run folder, so that a run is under way."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # Shared, and released at once: a run that starts at this moment tries again (`_lock`).
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


_held: dict[Path, Lock] = {}


def _owner(variables: Mapping[str, str]) -> Owner:
    launch, generation = variables.get(LAUNCH_ID, ""), variables.get(GENERATION, "0")
    number = int(generation) if generation.isdecimal() else 0
    return Owner(launch, number, socket.gethostname(), os.getpid(), uuid.uuid4().hex[:8])


def _write(descriptor: int, owner: Owner) -> None:
    content = json.dumps(asdict(owner)).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


def _parse(content: bytes) -> Owner | None:
    """The owner that a lock file names; None for a file of an early version, or while it is being written."""
    try:
        found = Owner(**json.loads(content))
    except (ValueError, TypeError):
        return None
    types = (str, int, str, int, str)
    valid = all(type(value) is kind for value, kind in zip(asdict(found).values(), types, strict=True))
    return found if valid else None


def _superseded(folder: Path, by: Owner | None) -> Superseded:
    start = f"restart {by.generation} on {_plain(by.host)}" if by is not None and by.launch else "another run"
    return Superseded(
        f"{folder} was taken over by {start}; this process ends, and has changed nothing since",
        "nothing to do: the run continues there, from its newest checkpoint",
    )


def _not_locked(folder: Path, error: OSError, owner: Owner | None) -> UserError:
    if isinstance(error, BlockingIOError):
        by = f" (process {owner.pid} on {_plain(owner.host)})" if owner is not None else ""
        return UserError(
            f"{folder} is being written by another run{by}",
            "wait for it to end, or choose another --run.name",
        )
    return UserError(
        f"cannot lock {folder} ({error.strerror}), so a second run could write it too",
        "choose a --run.dir on a local disk, or mount the network share with locks (NFS: without nolock, with lockd "
        "running)",
    )


def _is_linked(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the file of this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _plain(text: str) -> str:
    """A name from a file, shortened and without control characters."""
    return printable(text[:64])
