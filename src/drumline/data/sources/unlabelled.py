"""Images without labels (`distill.unlabelled`) behind the labelled training samples of any source.

Promises: the labelled samples keep their ids; the others follow, in the order of their paths, with the label -1. The
classes are those of the labelled samples. Beside image files, the others are read as they are; beside an array of
colour images of one size, they are decoded and resized to that size when the data is opened. Rejects a folder or tar
without images, and a folder that contains the labelled data, whose evaluation images it would add.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.data.image.decode import decode
from drumline.data.image.resize import resize
from drumline.data.sources.base import (
    ArrayDataset,
    Dataset,
    DatasetSpec,
    EncodedDataset,
    Images,
    PooledDataset,
)
from drumline.data.sources.folder import open_unlabelled_folder
from drumline.data.sources.tar import open_unlabelled_tar

Item = TypeVar("Item")


def add_unlabelled(labelled: Dataset, spec: DatasetSpec) -> Dataset:
    """The samples of a split, and after them the images of `spec.unlabelled`."""
    others = _open(spec)
    labels = np.concatenate([labelled.labels, others.labels])
    if isinstance(labelled, EncodedDataset):
        return JoinedFiles(labelled, others)
    if isinstance(labelled, PooledDataset) or labelled.shape[2] != 3:
        what = "repeats a few images" if isinstance(labelled, PooledDataset) else "has grey images"
        raise UserError(
            f"distill.unlabelled: the source {labelled.name} {what}, to which colour images cannot be added",
            "use it with image files, or with an array of colour images",
        )
    images = np.concatenate([labelled.images, _array(others, labelled.shape)])
    return ArrayDataset(labelled.name, images, labels, labelled.classes)


class JoinedFiles(EncodedDataset):
    """The samples of one dataset, and after them those of another."""

    def __init__(self, first: EncodedDataset, second: EncodedDataset) -> None:
        super().__init__(first.name, np.concatenate([first.labels, second.labels]), first.classes)
        self._parts, self._cut = (first, second), len(first)
        self.skipped = Counter(first.skipped) + Counter(second.skipped)
        self.remarks = (*first.remarks, *second.remarks)

    def read(self, sample: int) -> bytes:
        part, at = self._find(sample)
        return part.read(at)

    def where(self, sample: int) -> str:
        part, at = self._find(sample)
        return part.where(at)

    def decoded(self, sample: int) -> Images | None:
        part, at = self._find(sample)
        return part.decoded(at)

    def names(self) -> bytes:
        return b"\0".join(part.names() for part in self._parts)

    def sample_names(self, samples: NDArray[np.integer]) -> list[str]:
        return self._in_order(samples, lambda part, ids: part.sample_names(ids))

    def sample_sizes(self, samples: NDArray[np.integer]) -> list[int]:
        return self._in_order(samples, lambda part, ids: part.sample_sizes(ids))

    def file_paths(self, samples: NDArray[np.integer]) -> Sequence[bytes] | None:
        paths = self._in_order(samples, lambda part, ids: part.file_paths(ids) or [b""] * len(ids))
        return paths if all(paths) else None

    def _in_order(
        self,
        samples: NDArray[np.integer],
        of: Callable[[EncodedDataset, NDArray[np.integer]], Sequence[Item]],
    ) -> list[Item]:
        """What both parts have of their samples, in the order of `samples`."""
        second = samples >= self._cut
        rows = zip(self._parts, (~second, second), (0, self._cut), strict=True)
        found = [iter(of(part, samples[mine] - start)) for part, mine, start in rows]
        return [next(found[part]) for part in second.astype(int).tolist()]

    def _find(self, sample: int) -> tuple[EncodedDataset, int]:
        second = sample >= self._cut
        return self._parts[second], sample - self._cut * second


def _open(spec: DatasetSpec) -> EncodedDataset:
    path = Path(spec.unlabelled).expanduser()
    if not path.exists():
        raise UserError(f"distill.unlabelled {path} does not exist", "check the path")
    if not path.is_dir():
        return open_unlabelled_tar(path)
    data = Path(spec.path).expanduser().resolve()
    if spec.path and data.is_dir() and data.is_relative_to(path.resolve()):
        raise UserError(
            f"distill.unlabelled {path} contains data.path {spec.path}, and so its evaluation images",
            "give a folder of other images",
        )
    return open_unlabelled_folder(path)


def _array(files: EncodedDataset, shape: tuple[int, int, int]) -> Images:
    """All images, resized to the height and width of the shape."""
    images = np.empty((len(files), *shape), np.uint8)
    for sample, image in enumerate(images):
        image[:] = resize(np.asarray(decode(files.read(sample), files.where(sample))), shape[1::-1])
    return images
