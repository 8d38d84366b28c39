"""What decides a teacher's outputs, as a key: two runs with the same one may share a cache.

Promises: a pure function of the settings and the data: teacher, transform, seed, labels, the stored content of a few
images spread over the set, and what is kept of an output. Refuses views that mix images.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from drumline.core.errors import LostError, UserError
from drumline.data.feed.transform import Transform
from drumline.data.sources import ArrayDataset, Dataset
from drumline.distill.cache.payload import Rule

FORMAT = 1
LOOKED_AT = 64
"""Images whose content is in the key."""
WORDS = {
    "teacher": "the teacher",
    "transform": "the image transform",
    "source": "the data",
    "samples": "the number of samples",
    "labels_crc": "the checksum of the labels",
    "content": "the images",
    "seed": "run.seed",
    "classes": "the teacher's number of classes",
    "top_k": "logits kept per sample (0: all)",
    "pooled": "pooled features kept per sample (0: none)",
    "dtype": "the type of the stored numbers",
    "format": "the format of the cache",
}
"""Each field for people."""


@dataclass(frozen=True)
class Key:
    """All that decides an output. Two runs with the same key may share a cache."""

    teacher: str
    """Names, SHA-256 of the weights, precision, and how several are made one; parts separated by `; `."""
    transform: str
    """Whatever decides pixels: `describe_transform`."""
    source: str
    samples: int
    labels_crc: int
    content: str
    """`content_of`"""
    seed: int
    classes: int
    top_k: int
    pooled: int
    dtype: str
    format: int = FORMAT

    @property
    def rule(self) -> Rule:
        """How a row is written."""
        return Rule(self.classes, self.dtype, self.top_k, self.pooled)


def make_key(
    *,
    teacher: str,
    source: Dataset,
    transform: Transform,
    mean: Sequence[float],
    std: Sequence[float],
    seed: int,
    rule: Rule,
) -> Key:
    """The key of a teacher's outputs on a set. Refuses views that mix images."""
    if transform.mixes:
        raise UserError(
            "distill.cache: mixed images depend on their neighbour in the batch (data.mixup, data.cutmix), and "
            "outputs are kept per sample",
            "leave out --distill.cache, or set data.mixup and data.cutmix to 0",
        )
    return Key(
        teacher=teacher,
        transform=describe_transform(transform, mean, std),
        source=source.name,
        samples=len(source),
        labels_crc=zlib.crc32(source.labels.tobytes()),
        content=content_of(source, unreadable=transform.on_bad != "raise"),
        seed=seed,
        classes=rule.classes,
        top_k=rule.top,
        pooled=rule.pooled,
        dtype=rule.dtype,
    )


def content_of(source: Dataset, unreadable: bool = False) -> str:
    """Start of the SHA-256 of up to LOOKED_AT images as they are stored: the first, the last, and others evenly
    between. With `unreadable`, one that cannot be read counts as such; without, it is refused."""
    count = min(len(source), LOOKED_AT)
    digest = hashlib.sha256()
    for sample in (np.arange(count) * (len(source) - 1) // max(1, count - 1)).tolist():
        try:
            if isinstance(source, ArrayDataset):
                pixels = source.take(np.array([sample]))
                kind, data = str(pixels.shape), pixels.tobytes()
            else:
                kind, data = "file", source.read(sample)
        except UserError as error:
            if not unreadable or isinstance(error, LostError):
                raise
            kind, data = "unreadable", b""
        digest.update(f"{sample} {kind} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:16]


def describe_transform(transform: Transform, mean: Sequence[float], std: Sequence[float]) -> str:
    """Everything of a transform that decides what a teacher is shown, as text."""
    chosen = {item.name: getattr(transform, item.name) for item in fields(transform)}
    for mixed in ("mixup", "cutmix"):
        del chosen[mixed]
    if transform.augment != "none":
        del chosen["eval_crop"]
    pixels = asdict(chosen.pop("augmentation"))
    # Six digits: measured statistics may differ in the last one from machine to machine.
    chosen |= pixels | {"mean": [float(f"{value:.6g}") for value in mean]}
    chosen |= {"std": [float(f"{value:.6g}") for value in std]}
    return "; ".join(f"{name}={value}" for name, value in chosen.items())
