"""Class names: which class of one data set is which class of another, or of a model.

Promises: classes are matched by name, or by their count if a side has only numbers. Classes that do not match are
named, never guessed. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from drumline.config.sources import source_named
from drumline.core.text import printable

if TYPE_CHECKING:
    from drumline.data.sources.base import Dataset

SHOWN = 5


@dataclass(frozen=True)
class Classes:
    """The classes of a data set or of a model, in the order of their numbers."""

    names: tuple[str, ...]
    named: bool
    """False where the names are only the numbers 0 to K-1, as in idx and npz files."""

    @staticmethod
    def of(source: Dataset) -> Classes:
        folders = source_named(source.name).class_folders
        return Classes(source.classes, folders or source.classes != numbers(len(source.classes)))

    def __len__(self) -> int:
        return len(self.names)


class OtherClasses(Exception):
    """Classes that do not match; the text is the difference."""


def numbers(count: int) -> tuple[str, ...]:
    """The names of classes that have none."""
    return tuple(map(str, range(count)))


def label_map(
    model: Classes, data: Classes, present: Collection[int], by_number: bool = False
) -> tuple[NDArray[np.int64] | None, str]:
    """The model's output for each label of the data (None: the same number; -1: a class without samples that the
    model lacks), and what to say about it. `present` are the labels that have samples. `by_number` accepts numbered
    classes of which the data has fewer. Raises `OtherClasses`."""
    if model.names == data.names:
        return None, _missing(model, data, present)
    found = {name: number for number, name in enumerate(model.names)}
    unknown = [data.names[label] for label in sorted(present) if data.names[label] not in found]
    if (model.named or data.named) and not unknown:
        mapped = np.array([found.get(name, -1) for name in data.names], dtype=np.int64)
        return mapped, _missing(model, data, present)
    if len(model) == len(data) and not (model.named and data.named):
        return None, _by_number(model, data)
    if not model.named and not data.named and by_number and len(data) < len(model):
        return None, f"the data has {len(data)} of the model's {len(model)} classes, matched by number"
    raise OtherClasses(describe_difference(model, data, unknown))


def head_order(model: Classes, data: Classes) -> tuple[NDArray[np.int64] | None, str]:
    """For each class of the data, the row of the model's classifier that belongs to it (None: they are in the same
    order), and what to say about it. Every class must be on both sides. Raises `OtherClasses`."""
    if model.names == data.names:
        return None, ""
    if set(model.names) == set(data.names):
        rows = {name: row for row, name in enumerate(model.names)}
        order = np.array([rows[name] for name in data.names], dtype=np.int64)
        return order, "the classes are in a different order from the data's: matched by name"
    if len(model) == len(data) and not (model.named and data.named):
        return None, _by_number(model, data)
    known = set(model.names)
    raise OtherClasses(describe_difference(model, data, [name for name in data.names if name not in known]))


def describe_difference(
    model: Classes,
    data: Classes,
    unknown: Sequence[str] = (),
    sides: tuple[str, str] = ("the model", "the data"),
) -> str:
    """How two lists of classes differ; `unknown` are those of the data that the model lacks."""
    if not (model.named and data.named) and len(model) != len(data):
        return f"{sides[0]} has {_counted(model)}, {sides[1]} has {_counted(data)}"
    here = set(data.names)
    absent = [name for name in model.names if name not in here]
    parts = []
    if unknown:
        parts.append(f"{sides[0]} does not have {some_names(unknown)}")
    if absent:
        parts.append(f"{sides[1]} does not have {some_names(absent)}")
    near = [(name, get_close_matches(name, absent, n=1, cutoff=0.7)) for name in unknown[:SHOWN]]
    if guesses := [f"{_quoted(name)} may be {_quoted(match[0])}" for name, match in near if match]:
        parts.append(f"renamed? {', '.join(guesses)}")
    return "; ".join(parts) or "they are in a different order"


def class_warnings(train: Dataset, evaluation: Dataset) -> list[str]:
    """Warnings about classes without training or evaluation samples; none for made-up data."""
    if source_named(train.name).made_up:
        return []
    names = train.classes
    trained, scored = (_present(source) for source in (train, evaluation))
    warnings = []
    if len(trained) == 1:
        warnings.append(
            f"WARNING: the training set has only one class, {_quoted(names[next(iter(trained))])}: any "
            "model scores 100 %"
        )
    if odd := sorted(scored - trained):
        count = int(np.isin(evaluation.labels, odd).sum())
        warnings.append(
            f"WARNING: {count:,} evaluation samples are of classes without a training sample, so they will be "
            f"scored wrong: {some_names([names[label] for label in odd])}"
        )
    if odd := sorted(trained - scored):
        warnings.append(
            "WARNING: the evaluation set has no samples of these classes, so the score says nothing about them: "
            f"{some_names([names[label] for label in odd])}"
        )
    return warnings


def some_names(names: Sequence[str]) -> str:
    """The first names, quoted, and how many more there are."""
    rest = len(names) - SHOWN
    return ", ".join(map(_quoted, names[:SHOWN])) + (f" and {rest:,} more" if rest > 0 else "")


def _present(source: Dataset) -> set[int]:
    return set(np.unique(source.labels[source.labels >= 0]).tolist())


def _missing(model: Classes, data: Classes, present: Collection[int]) -> str:
    there = {data.names[label] for label in present}
    absent = [name for name in model.names if name not in there]
    if not absent:
        return ""
    return (
        f"the evaluation set has samples of {len(model) - len(absent):,} of the model's {len(model):,} classes; none "
        f"of {some_names(absent)}"
    )


def _by_number(model: Classes, data: Classes) -> str:
    side = "the data has" if model.named else "the weights have"
    return f"WARNING: {side} no class names, so the {len(model):,} classes are matched by number"


def _counted(classes: Classes) -> str:
    return f"{len(classes):,} classes" + (f" ({some_names(classes.names)})" if classes.named else "")


def _quoted(name: str) -> str:
    return f"'{printable(name)}'"
