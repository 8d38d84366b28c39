"""The key of a teacher cache: everything that determines the teacher's outputs. Runs with equal keys share a cache.

Promises: the key is a pure function of settings and data: teacher, transform, seed, labels, the stored bytes of some
images spread over the data set, and what a row keeps of an output. Rejects transforms that mix images.
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
from drumline.distillation.cache.payload import Rule

FORMAT = 1
SAMPLED_IMAGES = 64
"""Images whose bytes are part of the key."""
LABELS = {
    "teacher": "the teacher",
    "transform": "the image transform",
    "source": "the data",
    "samples": "the number of samples",
    "labels_crc": "the checksum of the labels",
    "content": "the images",
    "seed": "run.seed",
    "classes": "the teacher's number of classes",
    "top_k": "logits stored per sample (0: all)",
    "pooled": "pooled features stored per sample (0: none)",
    "dtype": "the type of the stored numbers",
    "format": "the format of the cache",
}
"""What messages call each field."""


@dataclass(frozen=True)
class Key:
    """Everything that determines an output."""

    teacher: str
    """Names, SHA-256 of the weights, precision, and how an ensemble is combined, separated by `; `."""
    transform: str
    """Everything that determines pixels: `describe_transform`."""
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
        """The format of a row."""
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
    """The key of a teacher's outputs on a data set. Rejects transforms that mix images."""
    if transform.mixes:
        raise UserError(
            "distill.cache: a cache stores outputs per sample, but mixed images (data.mixup, data.cutmix) depend on "
            "their neighbour in the batch",
            "remove distill.cache, or set data.mixup and data.cutmix to 0",
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
    """The start of the SHA-256 of up to SAMPLED_IMAGES stored images, evenly spaced from the first to the last. With
    `unreadable`, an image that cannot be read is hashed as unreadable; without, it raises."""
    count = min(len(source), SAMPLED_IMAGES)
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
    """Everything about a transform that determines the teacher's input, as text."""
    chosen = {item.name: getattr(transform, item.name) for item in fields(transform)}
    for mixed in ("mixup", "cutmix"):
        del chosen[mixed]
    if transform.augment != "none":
        del chosen["eval_crop"]
    pixels = asdict(chosen.pop("augmentation"))
    # Six digits: the last digits of measured statistics may differ between machines.
    chosen |= pixels | {"mean": [float(f"{value:.6g}") for value in mean]}
    chosen |= {"std": [float(f"{value:.6g}") for value in std]}
    return "; ".join(f"{name}={value}" for name, value in chosen.items())
