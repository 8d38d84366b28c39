"""Class folders inside an uncompressed tar archive, read in place.

Promises: nothing is ever written to disk; classes, sample ids, labels and bytes are those that the folder source
gives for the unpacked archive, or for its only folder when it has just one and that holds folders; of two members
with one name the later counts. Every offset and size is checked against the file. Compressed archives,
links among the images, absolute names and `..`, sparse members, and images outside class folders are rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.data.reading import open_error, open_regular
from drumline.data.sources.base import (
    NO_LABEL,
    DatasetSpec,
    Images,
    MappedFiles,
    NameBlock,
    NoEvalSplit,
    NoTrainSplit,
    map_file,
)
from drumline.data.sources.divide import holdout_ids, reject_holdout
from drumline.data.sources.folder import EVAL_FOLDERS, EXTENSIONS, SPLIT_LIKE, file_ending, is_hidden

COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}
ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
"""Extensions of archives. The compressed ones are rejected with the command that uncompresses them."""
BLOCK = 512
MAX_NAME = 1 << 16
MAX_PAX = 1 << 20


class TarFiles(MappedFiles):
    """The images of an archive. Finding them takes a pass over all headers in each process that opens it (about 10 s
    for 1.28 million); `drumline pack` makes a set that opens at once."""

    def __init__(
        self, file: Path, classes: tuple[str, ...], found: list[_Image], rows: NDArray[np.int64]
    ) -> None:
        kept = [found[row] for row in rows.tolist()]
        labels = np.array([image.label for image in kept], dtype=np.int64)
        super().__init__(
            "tar",
            labels,
            classes,
            [file],
            np.zeros(len(kept), dtype=np.int32),
            np.array([image.offset for image in kept], dtype=np.int64),
            np.array([image.length for image in kept], dtype=np.int64),
        )
        self._file, self._names = file, NameBlock(image.name for image in kept)

    def names(self) -> bytes:
        return self._names.tobytes()

    def where(self, sample: int) -> str:
        return f"{self._file}:{self._names[sample]}"

    def sample_names(self, samples: NDArray[np.integer]) -> list[str]:
        return [self._names[sample] for sample in samples.tolist()]


def is_tar(path: Path) -> bool:
    """Whether a file is an archive by its name, compressed or not."""
    return path.name.lower().endswith(ENDINGS) and path.is_file()


def open_tar(spec: DatasetSpec) -> TarFiles:
    """The images of a split: `train/` and `val/` (or valid, validation, test) in the archive, or class folders alone,
    divided by `holdout`."""
    file = Path(spec.path).expanduser()
    archive = open_archive(file)
    top = _tree(archive, file)
    train, evaluation = _layout(top, file, spec.whole)
    if spec.whole and evaluation is None and train is top.folders.get("train"):
        raise NoEvalSplit(
            f"{file} has a folder 'train' but no evaluation split",
            fix="unpack it and give the folder to score, or add a val/ beside train/ to the archive",
        )
    classes = _class_folders(train, file)
    if len(classes) == 1 and (only := train.folders[classes[0]]).images and not only.folders:
        raise UserError(
            f"{file}: all images lie in one folder, {only.path}/, so there is one class", fix=_WANTED
        )
    names, root = classes, train
    if evaluation is not None:
        reject_holdout(spec, str(file))
        if spec.split == "eval":
            root, names = evaluation, _class_folders(evaluation, file)
            if extra := sorted(set(names) - set(classes)):
                raise UserError(
                    f"{file}: {root.path}/ has the class folder {extra[0]!r}, which {train.path}/ has not",
                    fix="use the same class names in both; the training split must have every class",
                )
    found = _images(root, names, classes, file)
    labels = np.array([image.label for image in found], dtype=np.int64)
    rows = np.arange(len(found), dtype=np.int64) if evaluation else holdout_ids(labels, spec, str(file))
    source = TarFiles(file, tuple(classes), found, rows)
    source.skipped = Counter(
        file_ending(other)
        for name in names
        for folder in _walk(root.folders[name])
        for other in folder.others
    )
    return source


def open_unlabelled_tar(file: Path) -> TarFiles:
    """All images of an archive, in the order of their paths, without labels."""
    folders = sorted(_walk(_tree(open_archive(file), file)), key=lambda folder: folder.path)
    found = [_image(folder, name, NO_LABEL) for folder in folders for name in sorted(folder.images)]
    if not found:
        raise UserError(f"{file} has no images", fix=f"add images ({' '.join(EXTENSIONS)})")
    return TarFiles(file, (), found, np.arange(len(found), dtype=np.int64))


def open_archive(file: Path) -> Images:
    """The bytes of an uncompressed archive, loaded by the system on access."""
    return map_file(_present(file))


@dataclass(frozen=True, slots=True)
class Member:
    """A header. The data is `length` bytes from `offset` on, inside the archive."""

    name: str
    kind: str
    """`file`, `folder`, `symbolic link`, `hard link`, `device`, or `named pipe`."""
    offset: int
    length: int


def members(archive: Images, where: str) -> Iterator[Member]:
    """Walks the headers of a tar file: ustar, GNU and pax, as far as names and sizes go."""
    data, size = archive.data, len(archive)
    at, long_name, pax = 0, b"", dict[str, bytes]()
    while at + BLOCK <= size:
        header = bytes(data[at : at + BLOCK])
        if not any(header):
            return
        if _number(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * 0x20:
            raise _damaged(where, f"the header at byte {at} has a wrong checksum")
        kind = header[156:157]
        length = _number(header[124:136])
        if kind not in b"xgXLK" and "size" in pax:
            length = int(pax["size"]) if pax["size"].isdigit() and len(pax["size"]) < 20 else None
        if length is None:
            raise _damaged(where, f"the header at byte {at} has no readable size")
        start = at + BLOCK
        held = 0 if kind in b"123456" else length
        if held > size - start:
            raise UserError(
                f"{where} is cut off: the member at byte {at} has {held} bytes, only {size - start} are there",
                fix="download or make the archive again",
            )
        at = start + -(-held // BLOCK) * BLOCK
        if kind == b"L":
            long_name = bytes(data[start : start + _limited(length, MAX_NAME, where)]).rstrip(b"\0")
        elif kind in b"xX":
            pax |= _pax(bytes(data[start : start + _limited(length, MAX_PAX, where)]), where)
        elif kind not in b"gKV":
            name = long_name or pax.get("path") or _header_name(header)
            if kind == b"S" or any(key.startswith("GNU.sparse") for key in pax):
                raise UserError(
                    f"{where}: {_decode(name)} is stored as a sparse file",
                    fix="make the archive without --sparse",
                )
            if kind not in _KINDS:
                raise UserError(
                    f"{where}: {_decode(name)} is a member of an unknown type {kind!r}",
                    fix="make the archive again with `tar --format=pax -cf`",
                )
            folder = kind == b"5" or (kind in b"0\0" and name.endswith(b"/"))
            yield Member(_decode(name), "folder" if folder else _KINDS[kind], start, held)
            long_name, pax = b"", {}
    raise UserError(
        f"{where} is cut off: it ends at byte {size} without the mark that ends an archive",
        fix=f"download or make the archive again; if you are sure that it is complete: truncate -s +1024 {where}",
    )


_KINDS = {
    **dict.fromkeys((b"0", b"\0", b"7"), "file"),
    b"1": "hard link",
    b"2": "symbolic link",
    **dict.fromkeys((b"3", b"4"), "device"),
    b"5": "folder",
    b"6": "named pipe",
}


@dataclass(frozen=True, slots=True)
class _Image:
    name: str
    label: int
    offset: int
    length: int


@dataclass
class _Folder:
    """A folder of the archive, as unpacking would make it. Hidden entries are left out."""

    path: str
    folders: dict[str, _Folder] = field(default_factory=dict)
    images: dict[str, Member] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def _tree(archive: Images, file: Path) -> _Folder:
    """The folders and images of the archive."""
    top = _Folder("")
    known: dict[str, _Folder | None] = {}
    for member in members(archive, str(file)):
        folder_path, name = member.name, ""
        if member.kind != "folder":
            folder_path, _, name = member.name.rpartition("/")
        if folder_path not in known:
            known[folder_path] = _folder(top, _parts(folder_path, member.name, file))
        _parts(name, member.name, file)
        folder = known[folder_path]
        if folder is None or not name or is_hidden(name):
            continue
        image = name.lower().endswith(EXTENSIONS)
        if member.kind == "symbolic link" or (image and member.kind != "file"):
            raise UserError(
                f"{file}: {member.name} is a {member.kind}, not a file",
                fix="make the archive with `tar --dereference --hard-dereference`, or without that member",
            )
        if image:
            folder.images[name] = member
        else:
            folder.others.append(name)
    while len(top.folders) == 1 and not top.images:
        ((name, only),) = top.folders.items()
        if only.images or not only.folders or name.lower() in SPLIT_LIKE:
            break
        top = only
    return top


def _folder(top: _Folder, parts: list[str]) -> _Folder | None:
    """The folder of that path, made where it is new; None if it or one above it is hidden."""
    if any(map(is_hidden, parts)):
        return None
    for part in parts:
        top = top.folders.setdefault(part, _Folder(f"{top.path}/{part}".lstrip("/")))
    return top


def _parts(path: str, member: str, file: Path) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if member.startswith("/") or ".." in parts or "\0" in path:
        raise UserError(
            f"{file} has a member named {member!r}, which points outside the archive",
            fix="do not trust this archive, or make it again with names below one folder",
        )
    return parts


def _layout(top: _Folder, file: Path, whole: bool) -> tuple[_Folder, _Folder | None]:
    """As the folder source decides: `train` beside an evaluation folder, `train` with classes, or classes alone."""
    evaluation = next((top.folders[name] for name in EVAL_FOLDERS if name in top.folders), None)
    train = top.folders.get("train")
    if train is not None and (evaluation is not None or train.folders):
        return train, evaluation
    for name, folder in top.folders.items():
        if name.lower() in SPLIT_LIKE and folder.folders:
            if whole and evaluation is not None:
                return evaluation, None
            raise NoTrainSplit(
                f"{file}: the folder {folder.path}/ looks like a split, but there is no 'train' with classes",
                fix="name the two splits train and val; or, if it is a class, rename that class",
            )
    return top, None


_WANTED = "an archive holds train/CLASS/IMAGE and val/CLASS/IMAGE, or CLASS/IMAGE"


def _class_folders(root: _Folder, file: Path) -> list[str]:
    where = f"{file}: {root.path}/" if root.path else str(file)
    if root.images:
        some = ", ".join(sorted(root.images)[:3])
        what = "beside its class folders" if root.folders else "without class folders"
        raise UserError(f"{where} has {len(root.images)} images {what} ({some})", fix=_WANTED)
    if not root.folders:
        if inner := [name for name in root.others if name.endswith(ENDINGS)]:
            raise UserError(
                f"{where} holds archives ({inner[0]}), not images", fix="unpack the inner archives"
            )
        raise UserError(f"{where} has no class folders", fix=_WANTED)
    return sorted(root.folders)


def _images(root: _Folder, names: list[str], classes: list[str], file: Path) -> list[_Image]:
    """Every image below the class folders: folders in the order of their paths, names sorted."""
    number = {name: label for label, name in enumerate(classes)}
    found: list[_Image] = []
    for name in names:
        before = len(found)
        for folder in sorted(_walk(root.folders[name]), key=lambda folder: folder.path):
            found += [_image(folder, file_name, number[name]) for file_name in sorted(folder.images)]
        if len(found) == before:
            raise UserError(
                f"{file}: class {name!r} has no images",
                fix=f"add images ({' '.join(EXTENSIONS)}) or leave the folder out",
            )
    return found


def _image(folder: _Folder, name: str, label: int) -> _Image:
    member = folder.images[name]
    return _Image(f"{folder.path}/{name}".lstrip("/"), label, member.offset, member.length)


def _walk(folder: _Folder) -> Iterator[_Folder]:
    pending = [folder]
    while pending:
        folder = pending.pop()
        yield folder
        pending += folder.folders.values()


def _present(file: Path) -> Path:
    try:
        with open_regular(file) as stream:
            start = stream.read(8)
    except OSError as error:
        raise open_error(file, error) from error
    for signature, (name, command) in COMPRESSED.items():
        if start.startswith(signature):
            raise UserError(
                f"{file} is compressed by {name}; its members cannot be read one by one",
                fix=f"uncompress it first: {command} {file}",
            )
    if not start:
        raise UserError(f"{file} is empty", fix="download or make the archive again")
    return file


def _number(digits: bytes) -> int | None:
    """Octal text, or GNU's base-256 for large values; None for anything else."""
    if digits[0] == 0x80:
        return int.from_bytes(digits[1:], "big")
    text = digits.strip(b" \0")
    if not text:
        return 0
    return int(text, 8) if all(0x30 <= digit <= 0x37 for digit in text) else None


def _header_name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _pax(data: bytes, where: str) -> dict[str, bytes]:
    """Records of `length key=value` and a line end."""
    records: dict[str, bytes] = {}
    at = 0
    while at < len(data) and data[at]:
        space = data.find(b" ", at, at + 20)
        digits = data[at:space] if space > 0 else b""
        end = at + int(digits) if digits.isdigit() else 0
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not space < end <= len(data) or data[end - 1 : end] != b"\n" or not equals:
            raise _damaged(where, "an extended header is not as pax writes them")
        records[_decode(key)] = value
        at = end
    return records


def _limited(length: int, most: int, where: str) -> int:
    if length > most:
        raise _damaged(where, f"a name or an extended header of {length} bytes")
    return length


def _damaged(where: str, what: str) -> UserError:
    return UserError(
        f"{where} is not a tar archive, or is damaged: {what}", fix="download or make the archive again"
    )


def _decode(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
