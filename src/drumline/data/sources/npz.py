"""Arrays in a NumPy .npz file, by the names that Keras and MedMNIST use.

Promises: nothing in the file is unpickled; types and shapes are checked. With `test` arrays in the file these
are the evaluation split (MedMNIST's `val` arrays are not used); without them `holdout` makes one.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy_format
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.data.reading import open_regular, refused
from drumline.data.sources.arrays import (
    image_array,
    label_array,
    numbered_classes,
    refuse_bomb,
    within_classes,
)
from drumline.data.sources.base import ArrayDataset, DatasetSpec, holdout_ids, refuse_holdout

STYLES = (
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
            return _opened(spec, io.BufferedReader(stream), file)
    except OSError as error:
        if error.errno is None:  # about the content
            raise _unreadable(file, error) from error
        raise refused(file, error) from error


def _opened(spec: DatasetSpec, stream: BinaryIO, file: Path) -> ArrayDataset:
    try:
        arrays = np.load(stream, allow_pickle=False)
    except Exception as error:  # a damaged file, or one made to, gets nearly anything out of NumPy
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _unreadable(file, error) from error
    if not isinstance(arrays, NpzFile):
        raise UserError(f"{file} holds one array without a name", fix=_HOW)
    with arrays:
        return _open(spec, arrays, file)


_HOW = "write it with np.savez(file, x_train=..., y_train=..., x_test=..., y_test=...), without objects"


def _open(spec: DatasetSpec, arrays: NpzFile, file: Path) -> ArrayDataset:
    names = set(arrays.files)
    style = next((style for style in STYLES if names.issuperset(style[0])), None)
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
    images = image_array(_array(arrays, images_name, file), f"{file}: {images_name}")
    labels = label_array(_array(arrays, labels_name, file), len(images), f"{file}: {labels_name}")
    if own_split:
        refuse_holdout(spec, str(file))
        train_labels = labels
        if spec.split == "eval":
            stored = _array(arrays, train[1], file)
            train_labels = label_array(stored, stored.size, f"{file}: {train[1]}")
        classes = numbered_classes(train_labels, f"{file}: {train[1]}")
        return ArrayDataset("npz", images, within_classes(labels, classes, f"{file}: {labels_name}"), classes)
    classes = numbered_classes(labels, f"{file}: {labels_name}")
    ids = holdout_ids(labels, spec, str(file))
    return ArrayDataset("npz", images[ids], labels[ids], classes)


def _array(arrays: NpzFile, name: str, file: Path) -> NDArray[Any]:
    try:
        _check_size(arrays, name, file)
        value: NDArray[Any] = arrays[name]
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _unreadable(file, error, name) from error
    return value


def _check_size(arrays: NpzFile, name: str, file: Path) -> None:
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
    return UserError(f"{what} cannot be read without unpickling, or is damaged: {str(error)[:200]}", fix=_HOW)
