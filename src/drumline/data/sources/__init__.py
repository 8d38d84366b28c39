"""The sources of samples. `open_dataset(spec)` opens one as a `Dataset`; `detect_source` resolves `auto`.

Promises: sample ids are positions and never change. The same spec gives the same samples in every process.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from drumline.core.errors import UserError
from drumline.data.packed.format import looks_packed
from drumline.data.reading import LONGER, patiently_opened
from drumline.data.sources.arrays import idx_folder, open_idx, open_npz
from drumline.data.sources.base import (
    ArrayDataset,
    Dataset,
    DatasetSpec,
    EncodedDataset,
    MappedFiles,
    PooledDataset,
    channel_statistics,
    holdout_mask,
    refuse_holdout,
)
from drumline.data.sources.builtin import open_digits, open_synthetic
from drumline.data.sources.cifar import has_cifar, open_cifar
from drumline.data.sources.custom import open_custom
from drumline.data.sources.folder import open_folder
from drumline.data.sources.packed import PackedFiles, open_packed
from drumline.data.sources.tar import ENDINGS, open_tar

__all__ = [
    "ArrayDataset",
    "Dataset",
    "DatasetSpec",
    "EncodedDataset",
    "MappedFiles",
    "PackedFiles",
    "PooledDataset",
    "channel_statistics",
    "detect_source",
    "holdout_mask",
    "open_dataset",
    "open_same",
]

_MAY_HOLD_OUT: dict[str, Callable[[DatasetSpec], Dataset]] = {
    "folder": open_folder,
    "tar": open_tar,
    "packed": open_packed,
    "npz": open_npz,
}
_OWN_SPLIT: dict[str, Callable[[DatasetSpec], Dataset]] = {
    "idx": open_idx,
    "cifar10": open_cifar,
    "cifar100": open_cifar,
    "digits": open_digits,
    "synthetic": open_synthetic,
}


def open_dataset(spec: DatasetSpec, again: bool = False) -> Dataset:
    """Opens a split. What a user can fix is a `UserError`; a failing system is retried, then it is a `LostError`.
    `again`: this run has opened the data before, so anything wrong now is a loss."""
    return patiently_opened(lambda: _open(spec), spec.path, again, LONGER if again else ())


def open_same(spec: DatasetSpec, digest: str) -> Dataset:
    """Opens a split that another process of this run has opened. If a file is missing at this moment, ids would mean
    different files; so the digest must be the same, and the data is opened again until it is."""

    def opened() -> Dataset:
        source = _open(spec)
        if isinstance(source, EncodedDataset) and source.digest() != digest:
            raise UserError(
                f"{spec.path} has changed since the run began: {len(source):,} samples are there now",
                fix="restore what is missing or remove what was added; then continue with --checkpoint.resume auto",
            )
        return source

    return patiently_opened(opened, spec.path, again=True)


def _open(spec: DatasetSpec) -> Dataset:
    name = _known(spec.source)
    if name in _MAY_HOLD_OUT:
        return _MAY_HOLD_OUT[name](spec)
    refuse_holdout(spec, f"the source {name}")
    return _OWN_SPLIT[name](spec) if name in _OWN_SPLIT else open_custom(spec)


def detect_source(source: str, path: str, again: bool = False) -> str:
    """The source's name, with `auto` resolved by what is at the path: the digits if it is empty; an .npz
    file; a tar archive; a packed set; idx or CIFAR files; otherwise class folders. `again` as for `open_dataset`."""
    return patiently_opened(lambda: _detect(source, path), path, again, LONGER if again else ())


def _detect(source: str, path: str) -> str:
    if source != "auto":
        return _known(source)
    if not path:
        return "digits"
    place = Path(path).expanduser()
    if not place.exists():
        raise UserError(
            f"data.path {path} does not exist", fix="check the path, and that the disk is mounted"
        )
    if place.is_file():
        if place.suffix == ".npz":
            return "npz"
        if place.name.lower().endswith(ENDINGS):
            return "tar"
        raise UserError(
            f"data.path {path} is neither a folder nor an .npz or .tar file",
            fix="give a folder (images, idx or CIFAR files, a packed set), an .npz file or a .tar archive",
        )
    if looks_packed(place):
        return "packed"
    found = [name for name in ("cifar10", "cifar100") if has_cifar(name, path)]
    if idx_folder(path) is not None:
        found.insert(0, "idx")
    if len(found) > 1:
        raise UserError(
            f"data.path {path} holds more than one data set: {' and '.join(found)}",
            fix=f"say which, for example --data.source {found[0]}",
        )
    return found[0] if found else "folder"


def _known(source: str) -> str:
    names = [*_MAY_HOLD_OUT, *_OWN_SPLIT]
    module, colon, attribute = source.partition(":")
    if source in names or (colon and module and attribute):
        return source
    near = difflib.get_close_matches(source, names, n=1)
    raise UserError(
        f"data.source {source!r} is unknown" + (f"; did you mean {near[0]}?" if near else ""),
        fix=f"use one of {', '.join(names)}, or package.module:factory",
    )
