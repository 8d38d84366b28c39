"""Compares the tensors of a model with those of a file by name and shape, without running anything.

Promises: pure. A tensor of the same shape under a similar name is suggested for each that is missing. If all shapes
agree in their order although the names differ, it says so: then the weights can be renamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from torch import Tensor

from drumline.core.text import counted

_COUNTER = "num_batches_tracked"
"""Missing in old files, and harmless."""
_NAMED = 5


@dataclass(frozen=True)
class TensorComparison:
    """How the tensors of B fit A."""

    total: int
    missing: tuple[str, ...]
    """Only in A."""
    unexpected: tuple[str, ...]
    """Only in B."""
    misshapen: tuple[str, ...]
    nearest: Mapping[str, str]
    """For a missing name, an unexpected one of the same shape."""
    in_order: bool
    """Whether the shapes agree one by one in their order, whatever the names."""
    different: tuple[str, ...]
    """Tensors with different values, if both sides are files."""

    @property
    def equal(self) -> bool:
        return not (self.missing or self.unexpected or self.misshapen or self.different)


def compare_tensors(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], values: bool = False
) -> TensorComparison:
    """Compares two state dicts; `values` says whether values count, too."""
    mine, theirs = (
        {name: tensor for name, tensor in each.items() if not name.endswith(_COUNTER)} for each in (a, b)
    )
    missing = [name for name in mine if name not in theirs]
    unexpected = [name for name in theirs if name not in mine]
    shared = [name for name in mine if name in theirs]
    misshapen = [name for name in shared if mine[name].shape != theirs[name].shape]
    different = [
        name
        for name in shared
        if values and name not in misshapen and not bool((mine[name] == theirs[name]).all())
    ]
    shapes = [[tuple(tensor.shape) for tensor in each.values()] for each in (mine, theirs)]
    return TensorComparison(
        len(mine),
        tuple(missing),
        tuple(unexpected),
        tuple(f"{name} is {_shape(theirs[name])} in B and {_shape(mine[name])} in A" for name in misshapen),
        _nearest(missing, unexpected, mine, theirs),
        shapes[0] == shapes[1] and bool(missing),
        tuple(different),
    )


def tensor_lines(found: TensorComparison, fitting: Sequence[str] = ()) -> list[str]:
    """The result in words. `fitting`: built-in models that B fits."""
    if found.equal:
        return [f"equal: B fits A: {counted(found.total, 'tensor')} with the same names and shapes"]
    if not (found.missing or found.unexpected or found.misshapen):
        return [
            f"different: the same names and shapes, but {len(found.different):,} of {counted(found.total, 'tensor')} "
            f"have different values: {_some(found.different)}"
        ]
    groups = (
        (found.missing, "missing"),
        (found.unexpected, "unexpected"),
        (found.misshapen, "of a different shape"),
    )
    counts = [counted(len(names), f"tensor {how}", f"tensors {how}") for names, how in groups if names]
    lines = [f"different: B does not fit A: {', '.join(counts)}"]
    if found.in_order:
        pairs = [
            f"{theirs} for {mine}" for mine, theirs in zip(found.missing, found.unexpected, strict=False)
        ]
        lines.append(
            f"the names differ, but all {found.total:,} shapes agree in order: rename the tensors one by one "
            f"({_some(pairs)})"
        )
    if found.missing:
        named = [
            f"{name} (B has {found.nearest[name]})" if name in found.nearest else name
            for name in found.missing
        ]
        lines.append(f"only in A: {_some(named)}")
    lines += [f"only in B: {_some(found.unexpected)}"] if found.unexpected else []
    lines += [f"different shapes: {_some(found.misshapen)}"] if found.misshapen else []
    if fitting:
        lines.append(f"B fits {' and '.join(fitting)}")
    return lines


def _nearest(
    missing: Sequence[str],
    unexpected: Sequence[str],
    mine: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
) -> dict[str, str]:
    """The most similar free name of the same shape, for the first missing ones."""
    free = list(unexpected)
    found = {}
    for name in missing[: 4 * _NAMED]:
        alike = [each for each in free if theirs[each].shape == mine[name].shape]
        if alike:
            found[name] = max(alike, key=lambda each: SequenceMatcher(None, name, each).ratio())
            free.remove(found[name])
    return found


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest:,} more" if rest > 0 else "")


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "one number"
