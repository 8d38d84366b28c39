"""The certificate of a layout: before training, one step on the user's own model and batch is compared with plain
accumulation over the same micro-batches in one process.

Promises: the reference leaves the model as it was; a difference larger than rounding stops the run and is named, the
first one in the order in which data passes through the model; a difference of rounding is reported with its size.
Only `reference` computes; everything else is pure. Nothing here runs during training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from drumline.core.arithmetic import leave_no_trace
from drumline.core.errors import UserError
from drumline.parallel.norm import commit_statistics, forget_statistics
from drumline.training.equality import Claim, Row, Verdict


@dataclass(frozen=True)
class Reference:
    """What plain accumulation gives."""

    gradients: dict[str, Tensor | None]
    """Of every trainable parameter."""
    buffers: dict[str, Tensor]
    """After the step."""


@dataclass(frozen=True)
class Certificate:
    """All that was compared, merged over the ranks."""

    verdicts: tuple[Verdict, ...]
    micro_batches: int
    """Over all replicas."""
    layout: str
    description: str
    """The layout in one line."""
    hint: str = ""
    """What to look for first where a gradient is wrong."""

    @property
    def passes(self) -> bool:
        return not any(verdict.wrong for verdict in self.verdicts)


def reference(model: nn.Module, loss: Callable[[nn.Module, int], Tensor], micro_batches: int) -> Reference:
    """Plain accumulation, in this process: `loss(model, micro)` for one micro-batch after the other, each with its
    backward. The loss is weighted as in training. Afterwards gradients, buffers and generators are as before."""
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    with leave_no_trace(model, devices=[each.device for each in model.parameters()]):
        for parameter in model.parameters():
            parameter.grad = None
        forget_statistics(model)
        try:
            for micro in range(micro_batches):
                loss(model, micro).backward()
            commit_statistics(model)
            return Reference(gradients_of(model), copied(dict(model.named_buffers())))
        finally:
            forget_statistics(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Of every trainable parameter that is here (not on the meta device), as it stands: not a copy."""
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not parameter.is_meta
    }


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For a later comparison, on the host: a model that fills the device must still be certified."""
    return {
        name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items() if not tensor.is_meta
    }


def summary(certificate: Certificate) -> str:
    """A short line for the screen where all is well; nothing where there is more to say."""
    numbers = [row for verdict in certificate.verdicts for row in verdict.rows]
    if not certificate.passes or not all(row.finite for row in numbers):
        return ""
    return f"{certificate.layout} check passed: gradients match one process"


def message(certificate: Certificate) -> str:
    """The whole result in one line, for the log."""
    parts = [_describe(verdict, certificate.micro_batches) for verdict in certificate.verdicts]
    return "certificate: " + "; ".join(part for part in parts if part)


def as_json(certificate: Certificate) -> str:
    """The file of the run folder. Numbers that JSON cannot represent are null, with a reason."""
    return (
        json.dumps(
            {
                "passes": certificate.passes,
                "layout": certificate.description,
                "micro_batches": certificate.micro_batches,
                "words": message(certificate),
                "comparisons": [_verdict_json(verdict) for verdict in certificate.verdicts],
            },
            indent=1,
            allow_nan=False,
        )
        + "\n"
    )


def refuse(certificate: Certificate) -> UserError | None:
    """The error to stop with; None where everything passes."""
    for verdict in certificate.verdicts:
        if (row := verdict.first_wrong) is not None:
            text = _describe_wrong(verdict, row, certificate.micro_batches)
            return UserError(text, _fix(verdict, row, certificate.hint))
    return None


def _describe(verdict: Verdict, micro_batches: int) -> str:
    noun, total, right = verdict.claim.value, verdict.total, verdict.total - verdict.wrong
    if not total:
        return ""
    if verdict.claim.exact:
        if not verdict.wrong:
            return f"the rehearsal left all {total} {noun}s as they were"
        return f"{verdict.wrong} of {total} {noun}s changed by the rehearsal"
    subject = (
        "gradients of {} of {} parameters"
        if verdict.claim is Claim.GRADIENTS
        else "{} of {} buffers after a step"
    )
    text = f"{subject.format(right, total)} equal plain accumulation over {_pieces(micro_batches)}"
    if verdict.equal == total:
        text += ", bit for bit"
    elif right:
        text += f", {verdict.equal} of them bit for bit"
    worst = verdict.worst
    if worst is not None:
        text += f"; the largest difference: {worst.name}, {_size(worst, verdict.claim)}"
    if blind := sum(not row.finite for row in verdict.rows):
        text += f"; {blind} have NaN or infinity in the reference too, of which this proves little"
    return text


def _pieces(micro_batches: int) -> str:
    return f"{micro_batches} micro-batch{'es' * (micro_batches != 1)}"


def _size(row: Row, claim: Claim) -> str:
    if row.odd:
        return row.odd
    whose = "the largest gradient of its module" if claim is Claim.GRADIENTS else "its largest value"
    return f"by {row.relative:.1e} of {whose} ({row.absolute:.1e} absolute), where {row.limit:.0e} passes"


def _describe_wrong(verdict: Verdict, row: Row, micro_batches: int) -> str:
    noun = verdict.claim.value
    where = f" on rank {row.rank}" if row.rank >= 0 else ""
    others = f"{verdict.wrong} of {verdict.total} {noun}s differ, this is the first on the data's way"
    if row.odd:
        text = f"{'parameter' if verdict.claim is Claim.GRADIENTS else noun} {row.name!r} {row.odd}{where}"
    elif verdict.claim.exact:
        text = f"{noun} {row.name!r} was changed{where} by a rehearsed step, {_size(row, verdict.claim)}"
    else:
        of = "of " if verdict.claim is Claim.GRADIENTS else ""
        factor = f"; it is {row.scaled_by:.4g} times the reference" if row.scaled_by else ""
        text = (
            f"{noun} {of}{row.name!r} differs{where} from plain accumulation over {_pieces(micro_batches)} "
            f"{_size(row, verdict.claim)}{factor}"
        )
    return f"certificate: the {text}; {others}"


def _fix(verdict: Verdict, row: Row, hint: str) -> str:
    end = "certificate.json in the run folder has every number; parallel.layout = single lays nothing out"
    if verdict.claim.exact:
        return f"look for code in forward that writes it, or assigns another tensor in its place; {end}"
    if row.rank < 0:
        return f"give every stage a part of the model: parallel.split left this one out; {end}"
    if row.scaled_by:
        return f"look for a loss or a hook that divides or multiplies by the number of micro-batches or ranks; {end}"
    if hint:
        return f"{hint}; {end}"
    return (
        "look for a forward that draws random numbers of its own, keeps something from one call to the next, writes "
        "to its input, or uses one parameter in two stages; or, in bf16, a kernel that does not repeat its own "
        f"result (does --train.precision fp32 pass?); {end}"
    )


def _verdict_json(verdict: Verdict) -> dict[str, object]:
    first, worst = verdict.first_wrong, verdict.worst
    return {
        "of": verdict.claim.value,
        "total": verdict.total,
        "same_bits": verdict.equal,
        "wrong": verdict.wrong,
        "worst": _row_json(worst) if worst is not None else None,
        "first_wrong": _row_json(first) if first is not None else None,
        "different": [_row_json(row) for row in verdict.rows if not row.same_bits],
    }


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
