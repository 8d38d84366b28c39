"""The sources of data, in one table: help, checks, detection and opening are made from it.

To add a source, write a module in `data/sources/` with a function that opens a split, and an entry in `SOURCES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drumline.config.limits import Names


@dataclass(frozen=True)
class Source:
    """One value of `data.source`. Functions are `module:function`, imported only when they are needed."""

    open: str
    """Opens a split: called with a `DatasetSpec`, returns a `Dataset`."""
    about: str
    """What `data.path` is, for the help."""
    detect: str = ""
    """Whether a path, which exists, holds data of this source. Empty: the source is never detected."""
    needs_path: bool = True
    may_hold_out: bool = False
    """Whether `data.holdout` may divide the data. Otherwise it always has an evaluation split."""
    augment: Literal["none", "shift", "shift-flip"] = "shift"
    """What `data.augment` = auto means for arrays. Image files get crop-flip."""
    class_folders: bool = False
    """Whether the data names its classes, as folders do. Then names are compared even if they are numbers."""
    made_up: bool = False
    """Whether images and labels are generated, so that the log says nothing about the classes."""


_ARRAYS, _CIFAR = "drumline.data.sources.arrays", "drumline.data.sources.cifar"
SOURCES: dict[str, Source] = {
    "folder": Source(
        "drumline.data.sources.folder:open_folder",
        "class folders of images",
        may_hold_out=True,
        class_folders=True,
    ),
    "labels": Source(
        "drumline.data.sources.labels:open_labels",
        "a label file (.csv, .tsv, .parquet), or the folder that the paths in `labels` are relative to",
        detect="drumline.data.sources.labels:is_labels",
        needs_path=False,
        may_hold_out=True,
        class_folders=True,
    ),
    "tar": Source(
        "drumline.data.sources.tar:open_tar",
        "an uncompressed .tar of such folders, read in place",
        detect="drumline.data.sources.webdataset:is_class_tar",
        may_hold_out=True,
        class_folders=True,
    ),
    "webdataset": Source(
        "drumline.data.sources.webdataset:open_webdataset",
        "WebDataset shards (KEY.jpg with KEY.cls or KEY.json): a .tar, train-{000..099}.tar, or a folder of them",
        detect="drumline.data.sources.webdataset:is_webdataset",
        may_hold_out=True,
    ),
    "packed": Source(
        "drumline.data.sources.packed:open_packed",
        "a folder that `drumline pack` wrote",
        detect="drumline.data.packed.format:looks_packed",
        may_hold_out=True,
    ),
    "idx": Source(
        f"{_ARRAYS}:open_idx",
        "a folder with the four idx files of MNIST or a set like it, plain or gzipped",
        detect=f"{_ARRAYS}:is_idx",
    ),
    "cifar10": Source(
        f"{_CIFAR}:open_cifar",
        "a folder with CIFAR-10 as published, in its Python or binary version",
        detect=f"{_CIFAR}:is_cifar10",
        augment="shift-flip",
    ),
    "cifar100": Source(
        f"{_CIFAR}:open_cifar",
        "a folder with CIFAR-100 as published, in its Python or binary version",
        detect=f"{_CIFAR}:is_cifar100",
        augment="shift-flip",
    ),
    "npz": Source(
        f"{_ARRAYS}:open_npz",
        "a file with x_train, y_train, x_test, y_test; or train_images, ...; or images, labels with `holdout`",
        detect=f"{_ARRAYS}:is_npz",
        may_hold_out=True,
    ),
    "digits": Source(
        "drumline.data.sources.arrays:open_digits",
        "unused; 1,797 handwritten digits of 8 x 8 pixels, which come with Drumline",
        needs_path=False,
    ),
    "synthetic": Source(
        "drumline.data.sources.arrays:open_synthetic",
        "unused, or sizes such as classes=10,size=32,samples=2048; made-up images, for benchmarks",
        needs_path=False,
        augment="none",
        made_up=True,
    ),
}


def source_named(name: str) -> Source:
    """The table's entry. A user's own source has one of its own."""
    return SOURCES.get(name, _CUSTOM)


_CUSTOM = Source("drumline.data.sources.custom:open_custom", "passed to the factory", needs_path=False)


LIBRARIES = ("torchvision", "timm")
"""Packages of models that names begin with, as `timm/NAME` and `timm:WEIGHTS`."""


def names_code(name: str) -> bool:
    """Whether a name is a `package.module:thing`: the user's own code."""
    return ":" in name and name.partition("/")[0] not in LIBRARIES


INSTALLED = ("torch.optim", "torch.nn", "torch.nn.functional")
"""Modules of torch that only define optimizers, layers and losses, so they need no trust."""


def needs_trust(name: str) -> bool:
    """Whether a name is code that a recipe from elsewhere may run only with permission."""
    return names_code(name) and name.partition(":")[0] not in INSTALLED


SOURCE_NAMES = Names(
    ("auto", *SOURCES),
    details="The sources, with the meaning of `path`: "
    + ", ".join(f"`{name}` ({source.about})" for name, source in SOURCES.items()),
)
"""The limit of a field that names a source."""
