"""The embedded set: 1,797 handwritten digits of 8 x 8 pixels, for demo and tests without a download.

The test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI Machine Learning
Repository, CC BY 4.0; see `embedded/DIGITS_LICENSE.txt`). Every fifth sample (position mod 5 = 4) is
evaluation: 1,438 train, 359 evaluate.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from drumline.data.sources.base import ArrayDataset, DatasetSpec, Images

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
