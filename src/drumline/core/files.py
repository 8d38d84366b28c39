"""Atomic writes, reads that trust no file, and JSON manifests that carry their own checksum.

Promises: a file under its final name has the old content or the new one, never a part, even after kill -9, a full
disk or a power cut. A failed write leaves no temporary file; kill -9 may leave one, whose name ends in `.tmp`.
Reading never follows a link and never blocks on a pipe. Rejects a folder whose final name is taken, and any write to
a run folder that a later start of the run has taken over.

Manifests (of checkpoints, packed sets and teacher caches): any changed byte is found when one is read. The checksum
does not prove who wrote a file, so the caller checks the type and range of every field it uses. Fields that this
version does not know are ignored. A writer whose new fields must not be ignored raises the format number, so that
older readers reject the file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NoReturn

from drumline.core import lock
from drumline.core.errors import UserError

Key = Literal["seal", "sha256"]
"""The field of a manifest that holds its checksum. Packed sets use `sha256`: compact text is hashed, and fields keep
their order."""
MAX_BYTES = 256 << 20
"""Largest manifest: room for the names of many classes."""


class CorruptError(Exception):
    """A stored file is missing, damaged or not what it claims to be. The message names the file and the reason."""


def write_file(path: Path, write: Callable[[Path], None], durable: bool = True) -> None:
    """Calls `write` on a temporary file beside `path`, then renames that file to `path`. Durable on return; a file
    that can be made again need not be, and then nothing waits for the disk.

    If `write` or the disk fails, the temporary file is removed and the error is raised.
    """
    # Each call has its own name: two writers of one path cannot mix their bytes.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    lock.check(path)
    try:
        write(temporary)
        if durable:
            _sync_file(temporary)
        lock.check(path)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    """`write_file` for bytes."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_file(path, write, durable)


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """`write_file` for text, in UTF-8. Line endings stay as they are."""
    write_bytes(path, text.encode("utf-8"), durable)


def check_output(option: str, path: Path) -> None:
    """Rejects a file that the user named if it cannot be written: before the work, not after."""
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise UserError(f"{option} {path} cannot be written", "give a file in a folder that is writable")


def write_output(path: Path, content: bytes) -> None:
    """Writes a file that the user named. A link is followed, and a device or pipe is written into; anything else is
    replaced at once, by `write_bytes`."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(content)
    else:
        write_bytes(target, content)


def append_to(path: Path) -> FileIO:
    """Opens a file for appending and creates it if it is missing. Rejects a link, which could lead anywhere."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return FileIO(os.open(path, flags, 0o666), "ab")


def read_small(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises `CorruptError`, or FileNotFoundError."""
    with open_regular(path, raise_missing=True) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CorruptError(f"{path}: {size:,} bytes, more than the limit of {most:,}")
        content, done = bytearray(size), 0
        while done < size:
            done += read_into(path, file, memoryview(content)[done:])
        return bytes(content)


@contextmanager
def open_regular(path: Path, raise_missing: bool = False) -> Iterator[FileIO]:
    """Opens a regular file for reading. Raises `CorruptError` for a link, a folder or a pipe, without waiting for it,
    and for a missing file, unless `raise_missing` asks for FileNotFoundError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if raise_missing:
            raise
        raise CorruptError(f"{path}: is missing") from None
    except (OSError, ValueError) as error:
        link = path.is_symlink() if "\0" not in str(path) else False
        reason = "is a link, not a file" if link else getattr(error, "strerror", None) or str(error)
        raise CorruptError(f"{path}: {reason}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CorruptError(f"{path}: is not a regular file")
    with FileIO(handle, "rb") as file:
        yield file


def read_into(path: Path, file: FileIO, into: memoryview) -> int:
    """Reads at least one byte into the memory and returns how many. Raises `CorruptError` at the end of the file."""
    try:
        count = file.readinto(into)
    except OSError as error:
        raise CorruptError(f"{path}: {error.strerror}") from None
    if not count:
        raise CorruptError(f"{path}: was truncated while it was read")
    return count


def sync_folder(path: Path) -> None:
    """Makes the names inside a folder durable: a rename is only safe once its folder is synced."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot sync a folder and return EINVAL.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def rename_folder(temporary: Path, final: Path) -> None:
    """Renames a finished folder to its final name, after syncing every file and folder below it.

    Raises FileExistsError, and leaves `temporary` alone, if `final` exists. Both must be on one file system.
    """
    for folder, _, names in os.walk(temporary, topdown=False):
        for name in names:
            _sync_file(Path(folder, name))
        sync_folder(Path(folder))
    # Checked last: os.rename alone would silently replace an empty folder.
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, "the name is taken", str(final))
    lock.check(final)
    temporary.rename(final)
    sync_folder(final.parent)


# JSON manifests that carry their own checksum.


class NewerFormat(CorruptError):
    """The file needs a newer version of drumline. `found` is its format number."""

    def __init__(self, path: Path, found: object, newest: int) -> None:
        self.found = str(found)[:20]
        super().__init__(f"{path}: format {self.found}, this version reads formats up to {newest}")


def sealed_text(content: dict[str, Any], key: Key = "seal") -> str:
    """The content as JSON text with its checksum added."""
    if key == "sha256":
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return json.dumps({**content, key: digest}, indent=1) + "\n"
    digest = hashlib.sha256(_sorted(content).encode()).hexdigest()
    return _sorted({**content, key: digest})


def write_sealed(path: Path, content: dict[str, Any], key: Key = "seal") -> None:
    """Writes a manifest atomically."""
    write_text(path, sealed_text(content, key))


def read_sealed(path: Path, newest: int, *, version: str = "format", key: Key = "seal") -> dict[str, Any]:
    """The content of a manifest whose format, in the field `version`, is at most `newest`; 1 where there is none.
    Raises `CorruptError`, or FileNotFoundError."""
    return parse_sealed(read_small(path, MAX_BYTES), path, newest, version=version, key=key)


def parse_sealed(
    data: bytes, path: Path, newest: int, *, version: str = "format", key: Key = "seal"
) -> dict[str, Any]:
    """The same for bytes that were read from `path`."""
    try:
        text = data.decode()
        content = json.loads(text, parse_constant=_reject_constant)
        # The text is compared, not its meaning: 1E-7 in place of 1e-7 is a change too.
        if not isinstance(content, dict) or sealed_text(_without(content, key), key) != text:
            raise CorruptError(f"{path}: its checksum does not match")
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: not readable ({str(error)[:120]})") from None
    found = content.get(version, 1)
    if type(found) is not int or not 1 <= found <= newest:
        raise NewerFormat(path, found, newest)
    return _without(content, key)


def _sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sorted(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True)


def _without(content: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != key}


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
