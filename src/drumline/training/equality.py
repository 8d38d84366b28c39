"""Compares two sets of tensors by name: which have the same bits, which differ by rounding, which by more.

Promises: pure. A difference is measured against the scale of its module, and passes up to a tolerance of its dtype.
A gradient that only one side has, and NaN on only one side, are reported as such. The reports of ranks that hold
shards or copies of a model merge into one. Text and JSON describe a report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from drumline.core.precision import FP32, Precision

Values = Mapping[str, Tensor | None]
"""Tensors by name; None where there is no gradient."""
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Differences that rounding may cause, relative to a tensor's scale. A different order of addition gave up to 9e-7 in
fp32."""
PIECE = 1 << 22
"""The number of values that are compared at a time."""
LOOSE = 1e-3
"""The tolerance where each process chooses its own kernels (run.deterministic = false). A gradient that is divided
once too often, or lacks one of many micro-batches, differs by far more."""


class Subject(StrEnum):
    """What is compared; the value describes it in messages."""

    GRADIENTS = "gradient"
    """The layout's step has the gradients of accumulation."""
    BUFFERS_UNTOUCHED = "buffer"
    """The rehearsed step has left no trace."""
    BUFFERS_MOVED = "moved buffer"
    """After a real step, buffers have the values of accumulation."""

    @property
    def exact(self) -> bool:
        """Whether only the same bits pass."""
        return self is Subject.BUFFERS_UNTOUCHED


@dataclass(frozen=True)
class Row:
    """One tensor on one rank."""

    name: str
    order: int
    """Its position in the order in which data passes through the model."""
    rank: int
    same_bits: bool
    absolute: float = 0.0
    relative: float = 0.0
    """To the scale: the largest value of the reference in the tensor, or in a different one of the same module."""
    limit: float = 0.0
    """The largest relative difference that passes."""
    scaled_by: float = 0.0
    """The layout's gradient is the reference's times this factor; 0 if no factor explains it."""
    odd: str = ""
    """A difference without a size: a gradient on one side only, a different shape, NaN on one side only."""
    finite: bool = True

    @property
    def passes(self) -> bool:
        return self.same_bits or (not self.odd and self.relative <= self.limit)


@dataclass(frozen=True)
class EqualityReport:
    """A comparison, on one rank or all of them: the worst row of every tensor, in the order of the data."""

    subject: Subject
    rows: tuple[Row, ...]
    names: tuple[str, ...]
    """All tensors that the ranks together must compare."""

    @property
    def total(self) -> int:
        return len(self.rows)

    @property
    def equal(self) -> int:
        """Bit for bit."""
        return sum(row.same_bits for row in self.rows)

    @property
    def worst(self) -> Row | None:
        """The row with the largest difference; None if all are equal."""
        return max((row for row in self.rows if not row.same_bits), key=_badness, default=None)

    @property
    def first_wrong(self) -> Row | None:
        return next((row for row in self.rows if not row.passes), None)

    @property
    def wrong(self) -> int:
        return sum(not row.passes for row in self.rows)


def tolerance(dtype: torch.dtype, precision: Precision = FP32, loose: bool = False) -> float:
    """The relative difference that passes for tensors of this type, computed in this precision."""
    if dtype not in TOLERANCES:
        return 0.0
    return max(TOLERANCES[dtype], precision.tolerance, LOOSE if loose else 0.0)


def compare(
    own: Values,
    reference: Values,
    names: Sequence[str],
    *,
    subject: Subject = Subject.GRADIENTS,
    precision: Precision = FP32,
    loose: bool = False,
    rank: int = 0,
) -> EqualityReport:
    """Compares the tensors of this rank (`own`) with the reference, which must have all of them. `names` are those of
    the whole model, in the order in which data passes through it. `loose`: each process may choose its kernels."""
    scales = _scales(reference, subject)
    rows = [
        _row(
            Row(name, order, rank, same_bits=False),
            own[name],
            reference[name],
            scales.get(_family(name, subject), 0.0),
            0.0
            if subject.exact or (theirs := reference[name]) is None
            else tolerance(theirs.dtype, precision, loose),
        )
        for order, name in enumerate(names)
        if name in own
    ]
    return EqualityReport(subject, tuple(rows), tuple(names))


def merge(reports: Sequence[EqualityReport]) -> EqualityReport:
    """The comparisons of all ranks as one. A tensor counts once, on the rank where it is worst; a tensor that no rank
    holds is wrong."""
    subject, names = reports[0].subject, reports[0].names
    assert all(report.subject is subject and report.names == names for report in reports)
    worst: dict[str, Row] = {}
    for row in (row for report in reports for row in report.rows):
        if row.name not in worst or _badness(row) > _badness(worst[row.name]):
            worst[row.name] = row
    unheld = [
        Row(name, order, -1, same_bits=False, odd="is held by no rank")
        for order, name in enumerate(names)
        if name not in worst
    ]
    return EqualityReport(
        subject, tuple(sorted([*worst.values(), *unheld], key=lambda row: row.order)), names
    )


def describe(report: EqualityReport, micro_batches: int) -> str:
    """The result in a few words; empty if there was nothing to compare. The reference is plain accumulation over this
    number of micro-batches."""
    noun, total, right = report.subject.value, report.total, report.total - report.wrong
    if not total:
        return ""
    if report.subject.exact:
        if not report.wrong:
            return f"the rehearsal left all {total} {noun}s as they were"
        return f"{report.wrong} of {total} {noun}s changed by the rehearsal"
    what = (
        "gradients of {} of {} parameters"
        if report.subject is Subject.GRADIENTS
        else "{} of {} buffers after a step"
    )
    text = f"{what.format(right, total)} equal plain accumulation over {_micro_batches(micro_batches)}"
    if report.equal == total:
        text += ", bit for bit"
    elif right:
        text += f", {report.equal} of them bit for bit"
    worst = report.worst
    if worst is not None:
        text += f"; the largest difference: {worst.name}, {_size(worst, report.subject)}"
    if blind := sum(not row.finite for row in report.rows):
        text += f"; {blind} have NaN or infinity in the reference too, for which this proves little"
    return text


def describe_wrong(report: EqualityReport, row: Row, micro_batches: int) -> str:
    """The error message for the first tensor that does not pass."""
    noun = report.subject.value
    where = f" on rank {row.rank}" if row.rank >= 0 else ""
    others = (
        f"{report.wrong} of {report.total} {noun}s differ, this is the first one that data passes through"
    )
    if row.odd:
        text = f"{'parameter' if report.subject is Subject.GRADIENTS else noun} {row.name!r} {row.odd}{where}"
    elif report.subject.exact:
        text = f"{noun} {row.name!r} was changed{where} by a rehearsed step, {_size(row, report.subject)}"
    else:
        of = "of " if report.subject is Subject.GRADIENTS else ""
        factor = f"; it is {row.scaled_by:.4g} times the reference" if row.scaled_by else ""
        text = (
            f"{noun} {of}{row.name!r} differs{where} from plain accumulation over {_micro_batches(micro_batches)} "
            f"{_size(row, report.subject)}{factor}"
        )
    return f"certificate: the {text}; {others}"


def report_json(report: EqualityReport) -> dict[str, object]:
    """Plain values for a file. Numbers that JSON cannot represent are null, with a reason."""
    first, worst = report.first_wrong, report.worst
    return {
        "of": report.subject.value,
        "total": report.total,
        "same_bits": report.equal,
        "wrong": report.wrong,
        "worst": _row_json(worst) if worst is not None else None,
        "first_wrong": _row_json(first) if first is not None else None,
        "different": [_row_json(row) for row in report.rows if not row.same_bits],
    }


def _row(
    row: Row,
    own: Tensor | None,
    theirs: Tensor | None,
    scale: float,
    limit: float,
) -> Row:
    if own is None or theirs is None:
        there = own if theirs is None else theirs
        # An exchange of gradients may put zeros where backward puts nothing.
        if there is None or not bool(_plain(there).any()):
            return replace(row, same_bits=True)
        missing = (
            "has no gradient here" if own is None else "has a gradient here, though none in the reference"
        )
        return replace(row, odd=missing, absolute=_largest(there))
    if own.shape != theirs.shape:
        return replace(row, odd=f"is {tuple(own.shape)} here and {tuple(theirs.shape)} in the reference")
    a, b = _plain(own), _plain(theirs)
    finite = all(bool(torch.isfinite(piece).all()) for (piece,) in _pieces(b))
    row = replace(row, finite=finite)
    if a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
        return replace(row, same_bits=True)
    distance = _distance(a, b)
    if not math.isfinite(distance):
        return replace(row, odd="has NaN or infinity on one side alone")
    row = replace(row, absolute=distance, relative=_relative(distance, scale), limit=limit)
    return row if row.passes else replace(row, scaled_by=_scaled_by(a, b))


def _plain(tensor: Tensor) -> Tensor:
    """The dense tensor on the host."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.cpu().contiguous()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _wide(tensor: Tensor) -> Tensor:
    """In a dtype in which the difference of close values is exact."""
    return tensor if tensor.dtype is torch.float32 else tensor.double()


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of at most PIECE values, so that intermediate results take little memory."""
    return zip(*(tensor.flatten().split(PIECE) for tensor in tensors), strict=True)


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; not finite if a value is not finite and the other side has a different one."""

    def largest(a: Tensor, b: Tensor) -> Tensor:
        alike = (a == b) | (a.isnan() & b.isnan())
        return torch.where(alike, 0.0, (a - b).abs()).max()

    found = [largest(_wide(a), _wide(b)) for a, b in _pieces(a, b) if a.numel()]
    return float(torch.stack(found).max()) if found else 0.0


def _largest(tensor: Tensor) -> float:
    """The largest finite absolute value."""
    found = [
        float(_wide(values).abs().nan_to_num(0.0, 0.0, 0.0).max())
        for (values,) in _pieces(_plain(tensor))
        if values.numel()
    ]
    return max(found, default=0.0)


def _relative(distance: float, scale: float) -> float:
    if not distance:
        return 0.0
    return distance / scale if scale else math.inf


def _scaled_by(a: Tensor, b: Tensor) -> float:
    along = length = 0.0
    for x, y in _doubles(a, b):
        along, length = along + float(x @ y), length + float(y @ y)
    factor = along / length if length > 0 else 0.0
    if not math.isfinite(factor) or abs(factor - 1) < 1e-2:
        return 0.0
    off = max(float((x - factor * y).abs().max()) for x, y in _doubles(a, b))
    return factor if off <= 1e-3 * _largest(a) else 0.0


def _doubles(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return ((x.double(), y.double()) for x, y in _pieces(a, b))


def _family(name: str, subject: Subject) -> str:
    """The tensors that share a scale: gradients of one module. The gradient of a bias before a BatchNorm is zero
    except for rounding, so its own scale is that of the rounding (a different order of addition changed it by 2.3
    times that)."""
    return name.rpartition(".")[0] if subject is Subject.GRADIENTS else name


def _scales(reference: Values, subject: Subject) -> dict[str, float]:
    scales: dict[str, float] = {}
    for name, tensor in reference.items():
        if tensor is not None:
            family = _family(name, subject)
            scales[family] = max(scales.get(family, 0.0), _largest(tensor))
    return scales


def _badness(row: Row) -> tuple[bool, bool, float, float]:
    return not row.passes, bool(row.odd), row.relative, row.absolute


def _micro_batches(micro_batches: int) -> str:
    return f"{micro_batches} micro-batch{'es' * (micro_batches != 1)}"


def _size(row: Row, subject: Subject) -> str:
    if row.odd:
        return row.odd
    whose = "the largest gradient of its module" if subject is Subject.GRADIENTS else "its largest value"
    return f"by {row.relative:.1e} of {whose} ({row.absolute:.1e} absolute), where {row.limit:.0e} passes"


def _row_json(row: Row) -> dict[str, object]:
    return {
        "name": row.name,
        "rank": row.rank,
        "absolute": _number(row.absolute),
        "relative": _number(row.relative),
        "passes_up_to": row.limit,
        "times_reference": row.scaled_by or None,
        "reason": row.odd or ("" if math.isfinite(row.relative) else "the reference is zero"),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
