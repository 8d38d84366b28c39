"""A user's own data: `package.module:factory`, called as `factory(path=..., split="train" or "eval")`.

The factory returns an object with `images` and `labels`, or with `read(sample) -> bytes` and `labels`; `classes`
(names) is optional. Promises: arrays and tensors are checked and converted to NumPy once. An error in the factory is
reported with the factory's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.core.named import load_named
from drumline.data.image.decode import check_bytes
from drumline.data.reading import USERS, patiently
from drumline.data.sources.base import (
    ArrayDataset,
    Dataset,
    DatasetSpec,
    EncodedDataset,
    Labels,
    image_array,
    label_array,
    numbered_classes,
    within_classes,
)


def open_custom(spec: DatasetSpec) -> Dataset:
    """The object that the factory gives for this split. Without `classes`, the training split is opened too,
    since its labels show how many there are."""
    name, factory = spec.source, load_named(spec.source, "data.source", "(path, split)")
    given = _call(factory, spec.source, spec.path, spec.split)
    if not hasattr(given, "labels") or not (hasattr(given, "images") or hasattr(given, "read")):
        raise UserError(
            f"{name} returned a {type(given).__name__} without labels and images (or labels and read)",
            fix="return an object with images and labels, or with labels and read(sample) -> bytes",
        )
    if hasattr(given, "images"):
        images = image_array(_numpy(given.images, f"{name}: images"), f"{name}: images")
        labels = _labels(given, len(images), name)
        return ArrayDataset(name, images, labels, _classes(given, labels, spec, factory))
    if not callable(given.read):
        raise UserError(
            f"{name}: read is a {type(given.read).__name__}", fix="make it a method: read(sample) -> bytes"
        )
    labels = _labels(given, None, name)
    return CustomFiles(name, labels, _classes(given, labels, spec, factory), given)


class CustomFiles(EncodedDataset):
    """Encoded images from a user's object; its own `where(sample)` is used if it has one."""

    def __init__(self, name: str, labels: Labels, classes: tuple[str, ...], given: Any) -> None:
        super().__init__(name, labels, classes)
        self._given = given

    def read(self, sample: int) -> bytes:
        data = patiently(lambda: self._read(sample), self.where(sample))
        if not isinstance(data, bytes | bytearray | memoryview):
            raise UserError(
                f"{self.name}: read({sample}) returned a {type(data).__name__}",
                fix="return the encoded image as bytes",
            )
        check_bytes(len(data), self.where(sample))
        return bytes(data)

    def _read(self, sample: int) -> Any:
        try:
            return self._given.read(int(sample))
        except OSError as error:
            if error.errno is not None:
                raise
            # Not from the system: Pillow's errors about an image are OSErrors too.
            raise UserError(
                f"{self.where(sample)} cannot be read: {error}", fix="check the file and disk"
            ) from error

    def where(self, sample: int) -> str:
        where = getattr(self._given, "where", None)
        return str(where(int(sample))) if callable(where) else f"{self.name} sample {sample}"


def _call(factory: Callable[..., Any], name: str, path: str, split: str) -> Any:
    try:
        return factory(path=path, split=split)
    except (UserError, OSError) as error:
        if isinstance(error, UserError) or (error.errno is not None and error.errno not in USERS):
            raise
        raise _raised(name, path, split, error) from error
    except Exception as error:  # a user's factory may raise anything
        raise _raised(name, path, split, error) from error


def _raised(name: str, path: str, split: str, error: Exception) -> UserError:
    return UserError(
        f"{name}(path={path!r}, split={split!r}) raised {type(error).__name__}: {error}",
        fix="correct the factory; it is called with the keywords path and split",
    )


def _labels(given: Any, count: int | None, name: str) -> Labels:
    labels = _numpy(given.labels, f"{name}: labels")
    return label_array(labels, labels.size if count is None else count, f"{name}: labels")


def _classes(given: Any, labels: Labels, spec: DatasetSpec, factory: Callable[..., Any]) -> tuple[str, ...]:
    what = f"{spec.source}: labels"
    names = getattr(given, "classes", None)
    if names is not None:
        classes = tuple(str(class_name) for class_name in names)
        if len(set(classes)) != len(classes):
            raise UserError(
                f"{spec.source}: classes names a class twice", fix="give each class a name of its own"
            )
    elif spec.split == "train":
        classes = numbered_classes(labels, what)
    else:
        train = _call(factory, spec.source, spec.path, "train")
        classes = numbered_classes(_labels(train, None, f"{spec.source} (train)"), f"{what} (train)")
    within_classes(labels, classes, what)
    return classes


def _numpy(value: Any, what: str) -> NDArray[Any]:
    """An array from an array, a tensor, or a list of either. Copied where it was a tensor, so that no view of
    the user's storage is left."""
    import torch

    try:
        if isinstance(value, torch.Tensor):
            return np.array(value.detach().cpu().numpy())
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{what}: {error}", fix="give integer labels, and uint8 images that all have the same shape"
        ) from error
