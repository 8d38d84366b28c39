"""Drops files from the operating system's page cache, so that they are read from the disk again.

Promises: needs only permission to read the files, and changes none of them. Checks the result: asks the system
whether some of the files are still in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from drumline.core.progress import progress

CHECKED = 200
"""Files that are looked at afterwards."""
COLD = 0.1
"""The fraction of them that may still be in memory: other programs read too."""


@dataclass(frozen=True)
class Dropped:
    """What was dropped."""

    files: int
    bytes: int
    still_cached: float | None
    """The fraction of the files that is in memory nevertheless. None: the system does not tell."""

    @property
    def worked(self) -> bool:
        return bool(self.files) and self.still_cached is not None and self.still_cached <= COLD


def drop(paths: Sequence[Path]) -> Dropped:
    """Drops the files, and those inside the folders."""
    files, size = _drop(paths)
    cached = still_cached(files)
    if cached is not None and cached > COLD:  # pages that are not on the disk yet cannot be dropped
        os.sync()
        files, size = _drop(paths)
        cached = still_cached(files)
    return Dropped(len(files), size, cached)


def still_cached(files: Sequence[Path]) -> float | None:
    """The fraction of the files that are in memory, judged by the first page of some; None if that is not known."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    cached = []
    for path in files[:: max(1, len(files) // CHECKED)]:
        with _opened(path) as descriptor:
            if descriptor is None:
                continue
            try:
                cached.append(os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT) >= 0)
            except BlockingIOError:
                cached.append(False)
            except OSError:  # a file system that cannot say
                return None
    return sum(cached) / len(cached) if cached else None


def _drop(paths: Sequence[Path]) -> tuple[list[Path], int]:
    """The files, and their bytes."""
    files, size = [], 0
    with closing(progress(_inside(paths), "files dropped from memory")) as found:
        for path in found:
            with _opened(path) as descriptor:
                if descriptor is not None and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    files.append(path)
                    size += os.fstat(descriptor).st_size
    return files, size


def _inside(paths: Iterable[Path]) -> Iterator[Path]:
    """The files, and those in the folders; linked folders too, each once."""
    seen = set[Path]()
    for path in paths:
        if path.is_file():
            yield path
        for folder, inside, names in os.walk(path, followlinks=True):
            real = Path(folder).resolve()
            if real in seen:
                inside.clear()
                continue
            seen.add(real)
            yield from (Path(folder, name) for name in names)


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """The file, if it can be opened; never waits for a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)
