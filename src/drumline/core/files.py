"""The one place that writes files whole or not at all.

Promises: under the final name stands the old content or the new, never a part, even after kill -9, a full
disk or a power cut; a failed write leaves no temporary file (kill -9 may leave one, its name ends in `.tmp`).
Refuses to put a folder where something already stands, and to write into a run folder that a later start of the run
has taken over.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from drumline.core import lock


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place, durable on return.

    Any error of `write` or of the disk is raised again after the temporary file is gone.
    """
    # A name of its own per call: two writers of one path cannot mix their bytes.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    lock.check(path)
    try:
        write(temporary)
        _sync_file(temporary)
        lock.check(path)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """`write_file` for bytes at hand."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_file(path, write)


def write_text(path: Path, text: str) -> None:
    """`write_file` for text at hand: UTF-8, line ends as given on every system."""
    write_bytes(path, text.encode("utf-8"))


def append_to(path: Path) -> FileIO:
    """A file open for appending, made where it is new. Refuses a link: it could lead anywhere."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return FileIO(os.open(path, flags, 0o666), "ab")


def sync_folder(path: Path) -> None:
    """Make the names inside a folder durable: a rename is only safe once its folder is synced."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems know no fsync of folders and say EINVAL.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def rename_folder(temporary: Path, final: Path) -> None:
    """Put a finished folder in place: sync every file and folder below it, rename, sync the parent.

    Raises FileExistsError, and leaves `temporary` alone, when anything stands under `final`. Both must lie
    on one file system, best beside each other.
    """
    for folder, _, names in os.walk(temporary, topdown=False):
        for name in names:
            _sync_file(Path(folder, name))
        sync_folder(Path(folder))
    # Looked at only now: os.rename alone would silently replace an empty folder.
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, "will not replace what stands there", str(final))
    lock.check(final)
    temporary.rename(final)
    sync_folder(final.parent)


def _sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
