"""The images to predict: files, folders, tar archives and stdin, as names with a function that reads the bytes.

Promises: the order is that of the arguments, sorted by name within a folder; nothing is read before it is needed. A
path that does not exist, and a folder or archive without images, is an error before the model is loaded. A file that
is named directly is tried whatever its name; in folders and archives, only names of image files count.
"""

from __future__ import annotations

import sys
from collections import Counter
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


@dataclass(frozen=True)
class FoundImages:
    """The images, and the files of folders and archives that by their names are none, by extension."""

    images: list[ImageInput]
    skipped: Counter[str]


def find_images(paths: Iterable[str]) -> FoundImages:
    """The images that the paths mean. `-` is one image on stdin."""
    found, skipped = list[ImageInput](), Counter[str]()
    for path in paths:
        images = list(_images(path, skipped))
        if not images:
            fix = f"supported extensions: {' '.join(EXTENSIONS)}"
            if (Path(path) / "recipe.toml").is_file():
                fix = "the model comes first: drumline predict MODEL IMAGE..."
            raise UserError(f"{path} has no images", fix)
        found += images
    if sum(image.name == STDIN for image in found) > 1:
        raise UserError("- is given twice, but stdin can be read only once", "give - once")
    return FoundImages(found, skipped)


def _images(path: str, skipped: Counter[str]) -> Iterator[ImageInput]:
    place = Path(path).expanduser()
    if path == STDIN:
        yield ImageInput(STDIN, _read_stdin)
    elif not place.exists():
        raise UserError(f"{path} does not exist", "give image files, folders, .tar archives, or - for stdin")
    elif place.is_dir():
        yield from (ImageInput(name, partial(read_whole, name)) for name in _walk(place, skipped, set()))
    elif place.name.lower().endswith(ENDINGS):
        archive = open_archive(place)
        for member in members(archive, path):
            if member.kind == "file" and _is_image(member.name, skipped):
                name = f"{path}:{member.name}"
                yield ImageInput(name, partial(_read_member, archive, member, name))
    else:
        yield ImageInput(path, partial(read_whole, place))


def _walk(folder: Path, skipped: Counter[str], seen: set[Path]) -> Iterator[str]:
    """The image files below a folder, in the order of their names, files before folders, without hidden ones.
    Follows links, and visits each folder once."""
    if (real := folder.resolve()) in seen:
        return
    seen.add(real)
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    yield from (str(entry) for entry in entries if not entry.is_dir() and _is_image(entry.name, skipped))
    for entry in entries:
        if entry.is_dir():
            yield from _walk(entry, skipped, seen)


def _is_image(name: str, skipped: Counter[str]) -> bool:
    if any(part.startswith(".") for part in name.removeprefix("./").split("/")):
        return False
    if name.lower().endswith(EXTENSIONS):
        return True
    skipped[Path(name).suffix.lower() or "without extension"] += 1
    return False


def _read_member(archive: Images, member: Member, name: str) -> bytes:
    check_bytes(member.length, name)
    return bytes(archive[member.offset : member.offset + member.length])


@cache
def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise UserError("stdin is closed", "pipe an image into the command")
    data = sys.stdin.buffer.read()
    check_bytes(len(data), "stdin")
    return data
