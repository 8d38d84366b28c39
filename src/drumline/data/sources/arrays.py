"""Sources of arrays: MNIST's idx files, NumPy's .npz, the embedded digits, and synthetic images.

Promises: nothing in a file is unpickled. Types, shapes, counts and sizes are checked before a pixel is used. The
result is (N, H, W, C) uint8 with 1 or 3 channels, and (N,) int64 labels from 0. Other types and unclear shapes are
rejected with the line of NumPy that fixes them, instead of guessed.

The digits are 1,797 handwritten ones of 8 x 8 pixels, the test part of "Optical Recognition of Handwritten Digits"
(E. Alpaydin, C. Kaynak, UCI Machine Learning Repository, CC BY 4.0; see `embedded/DIGITS_LICENSE.txt`). Every fifth
sample (position mod 5 = 4) is for evaluation: 1,438 to train, 359 to evaluate.

Synthetic images are for measuring and testing without data, and a model can learn them. Each class has its own grid
of 4 x 4 colours; an image is half that grid, half noise. All of it is integer arithmetic on Philox bits, so it is the
same on every machine, and the two splits have different noise. Only as many distinct images as fit into 64 MiB are
made; longer sets repeat them.
"""

from __future__ import annotations

import difflib
import gzip
import io
import math
import os
import struct
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import psutil
from numpy.lib import format as npy_format
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.core.machine import usable_memory
from drumline.data.reading import open_error, open_regular
from drumline.data.sources.base import (
    ArrayDataset,
    DatasetSpec,
    Images,
    PooledDataset,
    image_array,
    label_array,
    numbered_classes,
    within_classes,
)
from drumline.data.sources.divide import holdout_ids, reject_holdout

_IDX_PREFIX = {"train": "train", "eval": "t10k"}


def open_idx(spec: DatasetSpec) -> ArrayDataset:
    """The images of a split. The path is the folder with the four files, or one that has them in `raw/`."""
    folder = _idx_folder(Path(spec.path).expanduser())
    if folder is None:
        raise UserError(
            f"{spec.path} has no idx files",
            fix="give the folder that holds train-images-idx3-ubyte, train-labels-idx1-ubyte, "
            "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte (or the same with .gz)",
        )
    train_labels = _read_idx(_required_idx(folder, "train", "labels"), dims=1)
    classes = tuple(str(number) for number in range(int(train_labels.max()) + 1))
    labels_file, images_file = (
        _required_idx(folder, _IDX_PREFIX[spec.split], kind) for kind in ("labels", "images")
    )
    labels = train_labels if spec.split == "train" else _read_idx(labels_file, dims=1)
    images = _read_idx(images_file, dims=3)
    if len(images) != len(labels):
        raise UserError(
            f"{images_file} has {len(images)} images, {labels_file} has {len(labels)} labels",
            fix="download both files again from the same source",
        )
    if labels.max() >= len(classes):
        raise UserError(
            f"{labels_file} contains the label {labels.max()}, but training labels end at {len(classes) - 1}",
            fix="use train and t10k files of the same data set",
        )
    return ArrayDataset("idx", images[..., None], labels.astype(np.int64), classes)


def is_idx(path: Path) -> bool:
    """Whether a folder holds idx files."""
    return _idx_folder(path) is not None


def _idx_folder(path: Path) -> Path | None:
    """The folder with the idx files: the path or `raw/` in it."""
    for folder in (path, path / "raw"):
        if _find_idx(folder, "train", "images") or _find_idx(folder, "t10k", "images"):
            return folder
    return None


def _find_idx(folder: Path, prefix: str, kind: str) -> Path | None:
    """The plain file before the gzipped one, the usual `-idx` before `.idx`."""
    dims = 3 if kind == "images" else 1
    names = (f"{prefix}-{kind}{mark}idx{dims}-ubyte{gz}" for gz in ("", ".gz") for mark in "-.")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _required_idx(folder: Path, prefix: str, kind: str) -> Path:
    found = _find_idx(folder, prefix, kind)
    if found is None:
        name = f"{prefix}-{kind}-idx{3 if kind == 'images' else 1}-ubyte"
        raise UserError(
            f"{folder} lacks {name} (or {name}.gz)", fix="put that file of the data set beside the others"
        )
    return found


def _read_idx(file: Path, dims: int) -> Images:
    """The array of an idx file: two zero bytes, type 8 (uint8), number of dimensions, sizes, data."""
    damaged = "download the file again; it is truncated, changed, or not what its name says"
    header_size = 4 + 4 * dims
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            header = stream.read(header_size)
            if len(header) < header_size or header[:4] != bytes((0, 0, 8, dims)):
                raise UserError(
                    f"{file} does not begin like an idx file of uint8 with {dims} sizes "
                    f"(first bytes {header[:4].hex(' ') or 'missing'})",
                    fix=damaged,
                )
            shape = struct.unpack(f">{dims}I", header[4:])
            size = math.prod(shape)
            if size == 0:
                raise UserError(f"{file} is empty: its header says {shape}", fix=damaged)
            if file.suffix != ".gz":
                held = file.stat().st_size - header_size
            else:
                check_unfolded_size(size, file.stat().st_size, str(file))
                # Stops soon after what the header promises: a longer file shows, a bomb does not unfold.
                data = bytearray()
                while len(data) <= size and (part := stream.read(1 << 20)):
                    data += part
                held = len(data)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise open_error(file, error) from error
        raise UserError(f"{file} cannot be read: {error}", fix=damaged) from error
    if held != size:
        raise UserError(
            f"{file} holds {held if held < size else f'more than {size}'} bytes of data, "
            f"its header says {' x '.join(map(str, shape))} = {size}",
            fix=damaged,
        )
    if file.suffix == ".gz":
        return np.frombuffer(data, dtype=np.uint8).reshape(shape)
    return np.asarray(np.memmap(file, dtype=np.uint8, mode="r", offset=header_size, shape=shape))


NPZ_NAMES = (
    (("x_train", "y_train"), ("x_test", "y_test")),
    (("train_images", "train_labels"), ("test_images", "test_labels")),
    (("images", "labels"), None),
)
"""Names of the training pair and of the evaluation pair."""


def is_npz(path: Path) -> bool:
    """Whether a file is an .npz by its name."""
    return path.suffix == ".npz" and path.is_file()


def open_npz(spec: DatasetSpec) -> ArrayDataset:
    """The images of a split. Labels are 0 to K-1, and every class occurs in training."""
    file = Path(spec.path).expanduser()
    try:
        stream = open_regular(file)
    except OSError as error:
        raise open_error(file, error) from error
    try:
        with stream:
            return _open_npz_stream(spec, io.BufferedReader(stream), file)
    except OSError as error:
        if error.errno is None:  # about the content
            raise _unreadable(file, error) from error
        raise open_error(file, error) from error


def _open_npz_stream(spec: DatasetSpec, stream: BinaryIO, file: Path) -> ArrayDataset:
    try:
        arrays = np.load(stream, allow_pickle=False)
    except Exception as error:  # a damaged file, or one made to, gets nearly anything out of NumPy
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _unreadable(file, error) from error
    if not isinstance(arrays, NpzFile):
        raise UserError(f"{file} holds one array without a name", fix=_HOW_TO_SAVE)
    with arrays:
        return _open_npz_arrays(spec, arrays, file)


_HOW_TO_SAVE = (
    "write it with np.savez(file, x_train=..., y_train=..., x_test=..., y_test=...), without objects"
)


def _open_npz_arrays(spec: DatasetSpec, arrays: NpzFile, file: Path) -> ArrayDataset:
    names = set(arrays.files)
    style = next((style for style in NPZ_NAMES if names.issuperset(style[0])), None)
    if style is None:
        raise UserError(
            f"{file} holds {', '.join(sorted(names)) or 'nothing'}; none of the known pairs of names",
            fix="name the arrays x_train, y_train, x_test, y_test (or images, labels with data.holdout)",
        )
    train, evaluation = style
    own_split = evaluation is not None and names.issuperset(evaluation)
    images_name, labels_name = train
    if own_split and spec.split == "eval":
        assert evaluation is not None
        images_name, labels_name = evaluation
    images = image_array(_npz_array(arrays, images_name, file), f"{file}: {images_name}")
    labels = label_array(_npz_array(arrays, labels_name, file), len(images), f"{file}: {labels_name}")
    if own_split:
        reject_holdout(spec, str(file))
        train_labels = labels
        if spec.split == "eval":
            stored = _npz_array(arrays, train[1], file)
            train_labels = label_array(stored, stored.size, f"{file}: {train[1]}")
        classes = numbered_classes(train_labels, f"{file}: {train[1]}")
        return ArrayDataset("npz", images, within_classes(labels, classes, f"{file}: {labels_name}"), classes)
    classes = numbered_classes(labels, f"{file}: {labels_name}")
    ids = holdout_ids(labels, spec, str(file))
    return ArrayDataset("npz", images[ids], labels[ids], classes)


def _npz_array(arrays: NpzFile, name: str, file: Path) -> NDArray[Any]:
    try:
        _check_npz_size(arrays, name, file)
        value: NDArray[Any] = arrays[name]
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _unreadable(file, error, name) from error
    return value


def _check_npz_size(arrays: NpzFile, name: str, file: Path) -> None:
    """NumPy allocates the array of the header before it looks for its bytes."""
    archive = arrays.zip
    assert archive is not None
    member = archive.getinfo(name if name in archive.namelist() else f"{name}.npy")
    with archive.open(member) as stream:
        version = npy_format.read_magic(stream)
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, _, dtype = read(stream)
        size = math.prod(shape) * dtype.itemsize
        if not dtype.hasobject and size != member.file_size - stream.tell():
            raise ValueError(f"the header says {shape} of {dtype}, the file holds {member.file_size:,} bytes")
    check_unfolded_size(size, member.compress_size, f"{file}: {name}")


def _unreadable(file: Path, error: Exception, name: str = "") -> UserError:
    what = f"{file}: {name}" if name else str(file)
    return UserError(
        f"{what} cannot be read without unpickling, or is damaged: {str(error)[:200]}", fix=_HOW_TO_SAVE
    )


TRUSTED_SIZE = 1 << 30
IMAGES_MOST = 200
"""How many times smaller than its pixels a large set of images may be stored: dSprites, drawn shapes of two colours,
is 115 times smaller."""
DEFLATE_MOST = 1100
"""More bytes than any byte compressed by deflate can unfold to (1,032)."""


def check_unfolded_size(size: int, stored: int, what: str) -> None:
    """Rejects data whose unfolded size is impossible for its stored bytes, is never that of images, or would fill the
    memory: each process of this machine unfolds it."""
    unfolded = f"{what} unfolds to {size / 2**30:,.1f} GiB, from {stored:,} bytes"
    if size > DEFLATE_MOST * stored + 1024 or (size > TRUSTED_SIZE and size > IMAGES_MOST * stored):
        raise UserError(
            f"{unfolded}; images do not compress like that",
            fix="do not trust this file; if it is right, store it uncompressed (np.savez, gunzip)",
        )
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    processes = max(1, int(text)) if text.isdecimal() else 1
    free = min(psutil.virtual_memory().available, usable_memory())
    if size * processes > free:
        each = f" in each of {processes} processes" if processes > 1 else ""
        raise UserError(
            f"{unfolded}{each}; {free / 2**30:,.1f} GiB of memory are free",
            fix="use more memory or fewer processes, or pack it first (drumline pack): processes share its "
            "memory",
        )


FILE = Path(__file__).parents[1] / "embedded" / "digits.npz"


def open_digits(spec: DatasetSpec) -> ArrayDataset:
    """The digits of a split. `spec.path` is not used."""
    with np.load(FILE, allow_pickle=False) as arrays:
        values, labels = arrays["images"], arrays["labels"]
    chosen = (np.arange(len(labels)) % 5 == 4) == (spec.split == "eval")
    images = scale(values[chosen])[..., None]
    return ArrayDataset("digits", images, labels[chosen].astype(np.int64), tuple("0123456789"))


def scale(values: Images) -> Images:
    """0..16 to 0..255: value x 255 // 16. The 17 results differ, so `(pixel * 16 + 254) // 255` undoes it."""
    return (values.astype(np.uint16) * 255 // 16).astype(np.uint8)


POOL_BYTES = 64 << 20
GRID = 4
KEY = 0x6472756D6C696E65  # "drumline"


@dataclass(frozen=True)
class Sizes:
    """The path of a synthetic source, as `classes=1000,size=224,samples=10000`; each is optional.
    Evaluation has a tenth of `samples`, at least one."""

    classes: int = 10
    size: int = 32
    samples: int = 2048


def open_synthetic(spec: DatasetSpec) -> PooledDataset:
    """Sample i shows image i mod (pool) and has that image's label, (i mod pool) mod classes.

    A pool smaller than the number of classes shows only its first classes: at size 224 that is 445.
    """
    sizes = parse_sizes(spec.path)
    samples = sizes.samples if spec.split == "train" else max(1, sizes.samples // 10)
    pool = min(samples, max(1, POOL_BYTES // (3 * sizes.size**2)))
    images = _noise(pool, sizes.size, stream=1 if spec.split == "train" else 2)
    shown = min(sizes.classes, pool)
    images >>= 1
    for label in range(shown):
        images[label::shown] += _pattern(label, sizes.size) >> 1
    labels = np.arange(samples, dtype=np.int64) % pool % shown
    return PooledDataset("synthetic", images, labels, tuple(str(number) for number in range(sizes.classes)))


def parse_sizes(path: str) -> Sizes:
    """Reads `name=number` pairs, separated by commas."""
    known = [field.name for field in fields(Sizes)]
    given: dict[str, int] = {}
    for pair in filter(None, (part.strip() for part in path.split(","))):
        name, _, text = (word.strip() for word in pair.partition("="))
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UserError(
                f"data.path {path!r}: the synthetic source has no {name!r}"
                + (f"; {near[0]}?" if near else ""),
                fix="write for example classes=10,size=32,samples=2048",
            )
        if not text.isascii() or not text.isdigit() or int(text) < (2 if name == "classes" else 1):
            least = 2 if name == "classes" else 1
            raise UserError(
                f"data.path {path!r}: {name} is {text!r}, not a whole number of at least {least}",
                fix=f"write for example {name}={getattr(Sizes, name)}",
            )
        given[name] = int(text)
    return Sizes(**given)


def _bits(count: int, stream: int, item: int) -> Images:
    """`count` bytes of Philox output; NumPy keeps this stream the same in every version."""
    generator = np.random.Philox(key=np.array([KEY, stream], dtype=np.uint64), counter=[0, 0, 0, item])
    words = generator.random_raw(-(-count // 8)).astype("<u8", copy=False)
    return words.view(np.uint8)[:count]


def _noise(pool: int, size: int, stream: int) -> Images:
    return _bits(pool * size * size * 3, stream, 0).reshape(pool, size, size, 3)


def _pattern(label: int, size: int) -> Images:
    grid = _bits(GRID * GRID * 3, 0, label).reshape(GRID, GRID, 3)
    cell = np.arange(size) * GRID // size
    return grid[cell][:, cell]
