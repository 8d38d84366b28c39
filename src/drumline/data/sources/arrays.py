"""Checks and shapes arrays that came from a file or from a user's own code.

Promises: what passes is (N, H, W, C) uint8 with 1 or 3 channels, and (N,) int64 labels from 0. Refuses other
types and unclear shapes with the line of NumPy that fixes them, instead of guessing.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.core.machine import usable_memory
from drumline.data.sources.base import Images, Labels

MAX_CLASSES = 1_000_000
TRUSTED_SIZE = 1 << 30
IMAGES_MOST = 200
"""How many times smaller than its pixels a large set of images may be stored: dSprites, drawn shapes of two colours,
is 115 times smaller."""
DEFLATE_MOST = 1100
"""More bytes than any byte compressed by deflate can unfold to (1,032)."""


def refuse_bomb(size: int, stored: int, what: str) -> None:
    """Refuses to unfold what cannot be in the stored bytes, what images never unfold to, and what would fill the
    memory, of which each process of this machine takes as much."""
    unfolded = f"{what} unfolds to {size / 2**30:,.1f} GiB, from {stored:,} bytes"
    if size > DEFLATE_MOST * stored + 1024 or (size > TRUSTED_SIZE and size > IMAGES_MOST * stored):
        raise UserError(
            f"{unfolded}; images do not compress like that",
            fix="do not trust this file; if it is right, store it uncompressed (np.savez, gunzip)",
        )
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    processes = max(1, int(text)) if text.isdecimal() else 1
    free = min(psutil.virtual_memory().available, usable_memory())
    if size * processes > free:
        each = f" in each of {processes} processes" if processes > 1 else ""
        raise UserError(
            f"{unfolded}{each}; {free / 2**30:,.1f} GiB of memory are free",
            fix="use more memory or fewer processes, or pack it first (drumline pack): processes share its "
            "memory",
        )


def image_array(images: NDArray[Any], what: str) -> Images:
    """Images as contiguous (N, H, W, C). Takes NHW, NHWC and NCHW."""
    if images.dtype != np.uint8:
        convert = (
            "for values from 0 to 1: np.clip(np.rint(x * 255), 0, 255).astype(np.uint8)"
            if images.dtype.kind == "f"
            else "after making sure that all values are from 0 to 255: x.astype(np.uint8)"
        )
        raise UserError(f"{what} is {images.dtype}, but images must be uint8", fix=f"convert them, {convert}")
    shape = images.shape
    if images.ndim not in (3, 4):
        raise UserError(
            f"{what} has the shape {shape}, which is not a stack of images",
            fix="reshape it to (N, H, W) or (N, H, W, C)",
        )
    if 0 in shape:
        raise UserError(f"{what} is empty: its shape is {shape}", fix="give at least one image")
    if images.ndim == 3:
        return np.ascontiguousarray(images[..., None])
    last, first = shape[3] in (1, 3), shape[1] in (1, 3)
    if last and first:
        raise UserError(
            f"{what} has the shape {shape}, which may be NHWC or NCHW",
            fix="drop the axis of a single channel, or pad the images so that no side is 1 or 3",
        )
    if not last and not first:
        raise UserError(
            f"{what} has the shape {shape}: no axis of 1 or 3 channels, neither last nor second",
            fix="give grey or RGB images as (N, H, W), (N, H, W, 3) or (N, 3, H, W)",
        )
    return np.ascontiguousarray(images if last else images.transpose(0, 2, 3, 1))


def label_array(labels: NDArray[Any], count: int, what: str) -> Labels:
    """Labels as (N,) int64. Takes (N,) and (N, 1) integers that are not negative."""
    if labels.ndim == 2 and labels.shape[1] > 1 and labels.shape[0] == count:
        raise UserError(
            f"{what} has the shape {labels.shape}: one row of numbers for each image, not one label",
            fix="for one-hot rows use labels.argmax(axis=1)",
        )
    if labels.size == 0:
        raise UserError(f"{what} is empty", fix="give at least one sample")
    if labels.dtype.kind not in "iu":
        raise UserError(
            f"{what} is {labels.dtype}, but labels must be integers",
            fix="number the classes from 0: labels = np.unique(labels, return_inverse=True)[1]",
        )
    if labels.ndim not in (1, 2) or labels.size != len(labels):
        raise UserError(
            f"{what} has the shape {labels.shape}, which is not one label for each image",
            fix="reshape it to (N,)",
        )
    if len(labels) != count:
        raise UserError(
            f"{what} has {len(labels)} labels for {count} images",
            fix="make both equally long; one of them may be cut off or from another split",
        )
    if labels.min() < 0 or labels.max() >= MAX_CLASSES:
        worst = labels.min() if labels.min() < 0 else labels.max()
        raise UserError(f"{what} contains the label {worst}", fix="number the classes 0 to K-1")
    return labels.reshape(-1).astype(np.int64)


def numbered_classes(labels: Labels, what: str) -> tuple[str, ...]:
    """Names `0` to `K-1` for training labels that use every number up to K-1."""
    counts = np.bincount(labels)
    if not counts.all():
        missing = int(np.flatnonzero(counts == 0)[0])
        raise UserError(
            f"{what} goes up to {len(counts) - 1}, but no sample has the label {missing}",
            fix="number the classes 0 to K-1: labels = np.unique(labels, return_inverse=True)[1], "
            "over training and evaluation labels together",
        )
    return tuple(str(number) for number in range(len(counts)))


def within_classes(labels: Labels, classes: tuple[str, ...], what: str) -> Labels:
    """The labels, none of them beyond the classes."""
    if labels.max() >= len(classes):
        raise UserError(
            f"{what} contains the label {labels.max()}, but there are {len(classes)} classes (0 to "
            f"{len(classes) - 1}) in the training data",
            fix="use the same numbering of classes for training and evaluation",
        )
    return labels
