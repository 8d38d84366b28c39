"""Sources that need no files: the embedded digits, and synthetic images.

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
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from drumline.core.errors import UserError
from drumline.data.sources.base import ArrayDataset, DatasetSpec, Images, PooledDataset

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
    """What the path of a synthetic source says, as `classes=1000,size=224,samples=10000`; each is optional.
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
