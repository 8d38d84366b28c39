"""Arrays in files: MNIST's idx files and NumPy's .npz; and the checks for any array that is not ours.

Promises: nothing in a file is unpickled. Types, shapes, counts and sizes are checked before a pixel is used. What
passes is (N, H, W, C) uint8 with 1 or 3 channels, and (N,) int64 labels from 0. Refuses other types and unclear
shapes with the line of NumPy that fixes them, instead of guessing.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import psutil
from numpy.lib import format as npy_format
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.core.machine import usable_memory
from drumline.data.reading import open_regular, refused
from drumline.data.sources.base import ArrayDataset, DatasetSpec, Images, Labels, holdout_ids, refuse_holdout

_IDX_PREFIX = {"train": "train", "eval": "t10k"}


def open_idx(spec: DatasetSpec) -> ArrayDataset:
    """The images of a split. The path is the folder with the four files, or one that has them in `raw/`."""
    folder = idx_folder(spec.path)
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


def idx_folder(path: str) -> Path | None:
    """Where below a path idx files lie, or None."""
    for folder in (Path(path).expanduser(), Path(path).expanduser() / "raw"):
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
                refuse_bomb(size, file.stat().st_size, str(file))
                # Stops soon after what the header promises: a longer file shows, a bomb does not unfold.
                data = bytearray()
                while len(data) <= size and (part := stream.read(1 << 20)):
                    data += part
                held = len(data)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise refused(file, error) from error
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


def open_npz(spec: DatasetSpec) -> ArrayDataset:
    """The images of a split. Labels are 0 to K-1, and every class occurs in training."""
    file = Path(spec.path).expanduser()
    try:
        stream = open_regular(file)
    except OSError as error:
        raise refused(file, error) from error
    try:
        with stream:
            return _open_npz_stream(spec, io.BufferedReader(stream), file)
    except OSError as error:
        if error.errno is None:  # about the content
            raise _unreadable(file, error) from error
        raise refused(file, error) from error


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
        refuse_holdout(spec, str(file))
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
    """NumPy makes the array that the header asks for before it looks for its bytes."""
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
    refuse_bomb(size, member.compress_size, f"{file}: {name}")


def _unreadable(file: Path, error: Exception, name: str = "") -> UserError:
    what = f"{file}: {name}" if name else str(file)
    return UserError(
        f"{what} cannot be read without unpickling, or is damaged: {str(error)[:200]}", fix=_HOW_TO_SAVE
    )


MAX_CLASSES = 1_000_000
TRUSTED_SIZE = 1 << 30
IMAGES_MOST = 200
"""How many times smaller than its pixels a large set of images may be stored: dSprites, drawn shapes of two colours,
is 115 times smaller."""
DEFLATE_MOST = 1100
"""More bytes than any byte compressed by deflate can unfold to (1,032)."""


def refuse_bomb(size: int, stored: int, what: str) -> None:
    """Refuses to unfold what cannot be in the stored bytes, what images never unfold to, and what would fill the
    memory, of which each process of this machine takes as much."""
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


def image_array(images: NDArray[Any], what: str) -> Images:
    """Images as contiguous (N, H, W, C). Takes NHW, NHWC and NCHW."""
    if images.dtype != np.uint8:
        convert = (
            "for values from 0 to 1: np.clip(np.rint(x * 255), 0, 255).astype(np.uint8)"
            if images.dtype.kind == "f"
            else "after making sure that all values are from 0 to 255: x.astype(np.uint8)"
        )
        raise UserError(f"{what} is {images.dtype}, but images must be uint8", fix=f"convert them, {convert}")
    shape = images.shape
    if images.ndim not in (3, 4):
        raise UserError(
            f"{what} has the shape {shape}, which is not a stack of images",
            fix="reshape it to (N, H, W) or (N, H, W, C)",
        )
    if 0 in shape:
        raise UserError(f"{what} is empty: its shape is {shape}", fix="give at least one image")
    if images.ndim == 3:
        return np.ascontiguousarray(images[..., None])
    last, first = shape[3] in (1, 3), shape[1] in (1, 3)
    if last and first:
        raise UserError(
            f"{what} has the shape {shape}, which may be NHWC or NCHW",
            fix="drop the axis of a single channel, or pad the images so that no side is 1 or 3",
        )
    if not last and not first:
        raise UserError(
            f"{what} has the shape {shape}: no axis of 1 or 3 channels, neither last nor second",
            fix="give grey or RGB images as (N, H, W), (N, H, W, 3) or (N, 3, H, W)",
        )
    return np.ascontiguousarray(images if last else images.transpose(0, 2, 3, 1))


def label_array(labels: NDArray[Any], count: int, what: str) -> Labels:
    """Labels as (N,) int64. Takes (N,) and (N, 1) integers that are not negative."""
    if labels.ndim == 2 and labels.shape[1] > 1 and labels.shape[0] == count:
        raise UserError(
            f"{what} has the shape {labels.shape}: one row of numbers for each image, not one label",
            fix="for one-hot rows use labels.argmax(axis=1)",
        )
    if labels.size == 0:
        raise UserError(f"{what} is empty", fix="give at least one sample")
    if labels.dtype.kind not in "iu":
        raise UserError(
            f"{what} is {labels.dtype}, but labels must be integers",
            fix="number the classes from 0: labels = np.unique(labels, return_inverse=True)[1]",
        )
    if labels.ndim not in (1, 2) or labels.size != len(labels):
        raise UserError(
            f"{what} has the shape {labels.shape}, which is not one label for each image",
            fix="reshape it to (N,)",
        )
    if len(labels) != count:
        raise UserError(
            f"{what} has {len(labels)} labels for {count} images",
            fix="make both equally long; one of them may be cut off or from another split",
        )
    if labels.min() < 0 or labels.max() >= MAX_CLASSES:
        worst = labels.min() if labels.min() < 0 else labels.max()
        raise UserError(f"{what} contains the label {worst}", fix="number the classes 0 to K-1")
    return labels.reshape(-1).astype(np.int64)


def numbered_classes(labels: Labels, what: str) -> tuple[str, ...]:
    """Names `0` to `K-1` for training labels that use every number up to K-1."""
    counts = np.bincount(labels)
    if not counts.all():
        missing = int(np.flatnonzero(counts == 0)[0])
        raise UserError(
            f"{what} goes up to {len(counts) - 1}, but no sample has the label {missing}",
            fix="number the classes 0 to K-1: labels = np.unique(labels, return_inverse=True)[1], "
            "over training and evaluation labels together",
        )
    return tuple(str(number) for number in range(len(counts)))


def within_classes(labels: Labels, classes: tuple[str, ...], what: str) -> Labels:
    """The labels, none of them beyond the classes."""
    if labels.max() >= len(classes):
        raise UserError(
            f"{what} contains the label {labels.max()}, but there are {len(classes)} classes (0 to "
            f"{len(classes) - 1}) in the training data",
            fix="use the same numbering of classes for training and evaluation",
        )
    return labels
