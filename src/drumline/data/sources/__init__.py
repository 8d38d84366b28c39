"""The sources of samples. `open_dataset(spec)` opens one as a `Dataset`; `detect_source` resolves `auto`.

Promises: sample ids are positions and never change. The same spec gives the same samples in every process.
"""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import Literal

from drumline.config.learning import Data
from drumline.config.sources import SOURCES, source_named
from drumline.core.errors import UserError
from drumline.data.reading import LONGER, patiently_opened
from drumline.data.sources.base import (
    ArrayDataset,
    Dataset,
    DatasetSpec,
    EncodedDataset,
    MappedFiles,
    PooledDataset,
)
from drumline.data.sources.divide import reject_holdout
from drumline.data.sources.shards import is_pattern
from drumline.data.sources.unlabelled import add_unlabelled

__all__ = [
    "ArrayDataset",
    "Dataset",
    "DatasetSpec",
    "EncodedDataset",
    "MappedFiles",
    "PooledDataset",
    "detect_source",
    "open_dataset",
    "open_same",
    "spec_of",
]


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


def detect_source(source: str, path: str, again: bool = False, labels: str = "") -> str:
    """The name of the source, with `auto` resolved by the data at the path: the digits if the path is empty, class
    folders if no other source recognises it. With `labels`, a label file says what the images are. `again` as for
    `open_dataset`."""
    if labels and source == "auto":
        return "labels"
    return patiently_opened(lambda: _detect(source, path), path, again, LONGER if again else ())


def spec_of(data: Data, source: str, split: Literal["train", "eval"]) -> DatasetSpec:
    """The split of a recipe's data, whose source has been detected."""
    return DatasetSpec(
        source=source,
        path=data.path,
        split=split,
        holdout=data.holdout,
        labels=data.labels,
        folds=data.folds,
        fold=data.fold,
        split_seed=data.split_seed,
    )


def _open(spec: DatasetSpec) -> Dataset:
    source = source_named(spec.source)
    if not source.may_hold_out:
        reject_holdout(spec, f"the source {spec.source}")
    opened: Dataset = resolve_name(source.open)(spec)
    return add_unlabelled(opened, spec) if spec.unlabelled else opened


def _detect(source: str, path: str) -> str:
    if source != "auto":
        return source
    if not path:
        return "digits"
    place = Path(path).expanduser()
    if not place.exists() and not is_pattern(path):
        raise UserError(
            f"data.path {path} does not exist", fix="check the path, and that the disk is mounted"
        )
    found = [name for name, each in SOURCES.items() if each.detect and resolve_name(each.detect)(place)]
    if len(found) > 1:
        raise UserError(
            f"data.path {path} holds more than one data set: {' and '.join(found)}",
            fix=f"name one, for example --data.source {found[0]}",
        )
    if not found and place.is_file():
        archive = "unpack it and give the folder, or " if path.lower().endswith(".zip") else ""
        raise UserError(
            f"data.path {path} is not a supported file",
            fix=f"{archive}give a folder of class folders, a .tar, a label file (.csv, .tsv, .parquet) or an .npz "
            "(`drumline train --help data.source` lists all)",
        )
    return found[0] if found else "folder"
