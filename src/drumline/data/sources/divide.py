"""Divides data without an evaluation split: a hold-out, or the folds of a cross-validation.

Promises: a division is a function of the labels, the positions and `data.split_seed`, never of `run.seed`, so runs
with different seeds are evaluated on the same samples. Each class is divided in the same proportion.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.data.sources.base import DatasetSpec, Labels, NoEvalSplit


def holdout_ids(labels: Labels, spec: DatasetSpec, where: str) -> NDArray[np.int64]:
    """The ascending positions of the spec's split, for data without an evaluation split."""
    if spec.folds:
        numbers = fold_numbers(labels, spec.folds, spec.split_seed)
        ids = np.flatnonzero((numbers == spec.fold) == (spec.split == "eval")).astype(np.int64)
        if len(ids) == 0:
            divided = np.count_nonzero(numbers >= 0)
            raise UserError(
                f"{where}: data.folds = {spec.folds}, but only {divided} samples can be divided (classes with one "
                "sample are not)",
                fix=f"set data.folds to at most {divided}"
                if divided
                else "add samples, or give the data an evaluation split",
            )
        return ids
    if spec.holdout == 0:
        if spec.split == "train" or spec.whole:
            return np.arange(len(labels), dtype=np.int64)
        raise NoEvalSplit(
            f"{where} has no evaluation split, and data.holdout is 0",
            fix="add --data.holdout 0.1 to set a tenth aside (for a cross-validation, --data.folds 5), or give the "
            "data an evaluation split",
        )
    mask = holdout_mask(labels, spec.holdout, spec.split_seed)
    ids = np.flatnonzero(mask if spec.split == "eval" else ~mask).astype(np.int64)
    if len(ids) == 0:
        raise UserError(
            f"{where}: data.holdout {spec.holdout:g} leaves nothing to evaluate: each class has one sample",
            fix="add samples, or give the data an evaluation split",
        )
    return ids


def reject_holdout(spec: DatasetSpec, where: str) -> None:
    """Rejects a holdout for data with an evaluation split, which would be silently ignored."""
    if spec.divides:
        field = f"data.folds is {spec.folds}" if spec.folds else f"data.holdout is {spec.holdout:g}"
        raise UserError(
            f"{field}, but {where} has an evaluation split of its own",
            fix=f"remove data.{'folds' if spec.folds else 'holdout'}",
        )


def holdout_mask(labels: Labels, fraction: float, seed: int = 0) -> NDArray[np.bool_]:
    """True for the samples that a holdout of `fraction` sets aside for evaluation.

    The rule: within each class of n samples, those with the n x fraction (rounded half up) smallest hashes of
    their position; at least one and at most n - 1, so a class of two or more is in both splits and a class
    of one is only in training. A hash is used rather than every k-th sample, because file names often repeat with a
    period (views of an object, frames of a clip), and a regular choice would take the same view each time.
    """
    assert 0 < fraction < 1, fraction
    labels = np.asarray(labels, dtype=np.int64)
    exact = Fraction(repr(float(fraction))).limit_denominator(1_000_000)
    counts = np.bincount(labels)
    wanted = (2 * counts * exact.numerator + exact.denominator) // (2 * exact.denominator)
    wanted = np.minimum(np.maximum(wanted, 1), np.maximum(counts - 1, 0))
    order = np.lexsort((_hash(_positions(len(labels), seed)), labels))
    rank_in_class = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    mask = np.zeros(len(labels), dtype=np.bool_)
    mask[order] = rank_in_class < wanted[labels[order]]
    return mask


def fold_numbers(labels: Labels, folds: int, seed: int = 0) -> NDArray[np.int64]:
    """The fold of each sample. Samples are dealt to the folds in turn: class by class, and within a class in the
    order of a hash of the position. So folds differ by at most one sample, in each class and overall. The only sample
    of a class is in no fold (-1): it is always for training, because nothing else could teach its class."""
    labels = np.asarray(labels, dtype=np.int64)
    order = np.lexsort((_hash(_positions(len(labels), seed)), labels))
    order = order[np.bincount(labels)[labels[order]] > 1]
    numbers = np.full(len(labels), -1, np.int64)
    numbers[order] = np.arange(len(order)) % folds
    return numbers


def _positions(count: int, seed: int) -> NDArray[np.uint64]:
    """The input of the hash for each sample; for seed 0, its position."""
    start = _hash(np.array([seed], np.uint64))[0] if seed else np.uint64(0)
    return np.arange(count, dtype=np.uint64) + start


def _hash(positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function: a bijection of 64-bit numbers without visible order."""
    x = positions + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
