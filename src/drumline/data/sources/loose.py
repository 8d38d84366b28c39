"""All image files below a folder, for `drumline verify` if the data set does not open."""

from __future__ import annotations

import os
from pathlib import Path

from drumline.core.errors import UserError
from drumline.data.reading import patiently, read_whole
from drumline.data.sources.base import EncodedDataset
from drumline.data.sources.folder import EXTENSIONS


class LooseFiles(EncodedDataset):
    """All files below a folder with an image extension, sorted by path."""

    def __init__(self, root: Path) -> None:
        self.unreadable: list[tuple[str, str]] = []
        self.paths: list[str] = []
        seen: set[tuple[int, int]] = set()

        def note(error: OSError) -> None:
            self.unreadable.append((str(error.filename), str(error.strerror)))

        for folder, folders, files in os.walk(root, onerror=note, followlinks=True):
            status = os.stat(folder)  # noqa: PTH116 (os.walk gives strings)
            if (status.st_dev, status.st_ino) in seen:  # a link back to a folder that has been visited
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            names = (name for name in files if name.lower().endswith(EXTENSIONS) and not name.startswith("."))
            self.paths += (f"{folder}{os.sep}{name}" for name in sorted(names))

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, sample: int) -> str:
        return self.paths[sample]

    def read(self, sample: int) -> bytes:
        path = Path(self.paths[sample])
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a broken link")
        return patiently(lambda: read_whole(path), str(path))
