"""The images to predict: files, folders, tar archives and stdin, as names with a function that reads the bytes.

Promises: the order is that of the arguments, sorted by name within a folder; nothing is read before it is needed. A
path that does not exist, and a folder or archive without images, is an error before the model is loaded. A file that
is named directly is tried whatever its name; in folders and archives, only names of image files count.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from drumline.core.errors import UserError
from drumline.data.image.decode import check_bytes
from drumline.data.reading import read_whole
from drumline.data.sources.base import Images
from drumline.data.sources.folder import EXTENSIONS
from drumline.data.sources.tar import ENDINGS, Member, members, open_archive

STDIN = "-"


@dataclass(frozen=True)
class ImageInput:
    """An image that can be read."""

    name: str
    read: Callable[[], bytes]


def find_images(paths: Iterable[str]) -> list[ImageInput]:
    """The images that the paths mean. `-` is one image on stdin."""
    found: list[ImageInput] = []
    for path in paths:
        images = list(_images(path))
        if not images:
            raise UserError(f"{path} has no images", f"supported formats: {' '.join(EXTENSIONS)}")
        found += images
    if sum(image.name == STDIN for image in found) > 1:
        raise UserError("- is given twice, but stdin can be read only once", "give - once")
    return found


def _images(path: str) -> Iterator[ImageInput]:
    place = Path(path).expanduser()
    if path == STDIN:
        yield ImageInput(STDIN, _read_stdin)
    elif not place.exists():
        raise UserError(f"{path} does not exist", "give image files, folders, .tar archives, or - for stdin")
    elif place.is_dir():
        yield from (ImageInput(name, partial(read_whole, name)) for name in _walk(place))
    elif place.name.lower().endswith(ENDINGS):
        archive = open_archive(place)
        for member in members(archive, path):
            if member.kind == "file" and _is_image(member.name):
                name = f"{path}:{member.name}"
                yield ImageInput(name, partial(_read_member, archive, member, name))
    else:
        yield ImageInput(path, partial(read_whole, place))


def _walk(folder: Path) -> Iterator[str]:
    """The image files below a folder, in the order of their names, without hidden ones."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (str(Path(parent, name)) for name in sorted(names) if _is_image(name))


def _is_image(name: str) -> bool:
    hidden = any(part.startswith(".") for part in name.removeprefix("./").split("/"))
    return name.lower().endswith(EXTENSIONS) and not hidden


def _read_member(archive: Images, member: Member, name: str) -> bytes:
    check_bytes(member.length, name)
    return bytes(archive[member.offset : member.offset + member.length])


@cache
def _read_stdin() -> bytes:
    data = sys.stdin.buffer.read()
    check_bytes(len(data), "stdin")
    return data
