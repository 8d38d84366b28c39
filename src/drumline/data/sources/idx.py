"""MNIST's idx files: MNIST, Fashion-MNIST and their like, plain (memory-mapped) or gzipped.

Promises: header, type, counts and the file's size are checked before a pixel is used, and images and labels
agree. Refuses anything else with the file and what is wrong with it.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from drumline.core.errors import UserError
from drumline.data.reading import refused
from drumline.data.sources.arrays import refuse_bomb
from drumline.data.sources.base import ArrayDataset, DatasetSpec, Images

_PREFIX = {"train": "train", "eval": "t10k"}


def open_idx(spec: DatasetSpec) -> ArrayDataset:
    """The images of a split. The path is the folder with the four files, or one that has them in `raw/`."""
    folder = idx_folder(spec.path)
    if folder is None:
        raise UserError(
            f"{spec.path} has no idx files",
            fix="give the folder that holds train-images-idx3-ubyte, train-labels-idx1-ubyte, "
            "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte (or the same with .gz)",
        )
    train_labels = _read(_file(folder, "train", "labels"), dims=1)
    classes = tuple(str(number) for number in range(int(train_labels.max()) + 1))
    labels_file, images_file = (_file(folder, _PREFIX[spec.split], kind) for kind in ("labels", "images"))
    labels = train_labels if spec.split == "train" else _read(labels_file, dims=1)
    images = _read(images_file, dims=3)
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
        if _find(folder, "train", "images") or _find(folder, "t10k", "images"):
            return folder
    return None


def _find(folder: Path, prefix: str, kind: str) -> Path | None:
    """The plain file before the gzipped one, the usual `-idx` before `.idx`."""
    dims = 3 if kind == "images" else 1
    names = (f"{prefix}-{kind}{mark}idx{dims}-ubyte{gz}" for gz in ("", ".gz") for mark in "-.")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _file(folder: Path, prefix: str, kind: str) -> Path:
    found = _find(folder, prefix, kind)
    if found is None:
        name = f"{prefix}-{kind}-idx{3 if kind == 'images' else 1}-ubyte"
        raise UserError(
            f"{folder} lacks {name} (or {name}.gz)", fix="put that file of the data set beside the others"
        )
    return found


def _read(file: Path, dims: int) -> Images:
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
