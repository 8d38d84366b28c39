"""The certificate of a layout: before training, one step on the run's own model and first batch is compared with
plain accumulation over the same micro-batches in one process.

Promises: the reference has the weights and random numbers of the step; each process compares what it holds; the run
is left as it was. The result is logged in one line and stored in full as certificate.json. A difference larger than
rounding stops the run and is named, the first one in the order in which data passes through the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from drumline.core.arithmetic import leave_no_trace
from drumline.core.errors import UserError
from drumline.core.files import write_text
from drumline.data.feed.batch import Batch
from drumline.observe.run_log import Log
from drumline.parallel.norm import WorldNorm, commit_statistics, forget_statistics
from drumline.parallel.reference import ReferenceModel
from drumline.parallel.sharded import full_tensor
from drumline.parallel.strategy import split_batch
from drumline.parallel.world import Grid, World
from drumline.training.equality import (
    EqualityReport,
    Row,
    Subject,
    Values,
    compare,
    describe,
    describe_wrong,
    merge,
    report_json,
)
from drumline.training.step import TrainStep

T = TypeVar("T")
FILE = "certificate.json"
TOO_LARGE = (
    "the whole model does not fit on one device next to what the layout holds there. A smaller model of the same "
    "kind can be certified"
)
NOT_REPEATED = (
    "the model does not repeat its own step: it stores values from one call to the next, or draws random numbers "
    "that no seed reaches"
)


@dataclass(frozen=True)
class Reference:
    """The result of plain accumulation."""

    gradients: dict[str, Tensor | None]
    """Of every trainable parameter."""
    buffers: dict[str, Tensor]
    """After the step."""


@dataclass(frozen=True)
class Certificate:
    """The comparisons of all ranks, merged."""

    reports: tuple[EqualityReport, ...]
    micro_batches: int
    """Over all replicas."""
    layout: str
    description: str
    """The layout in one line."""
    hint: str = ""
    """The first thing to look for if a gradient is wrong."""

    @property
    def passes(self) -> bool:
        return not _is_wrong(self.reports)


def reference(model: nn.Module, loss: Callable[[nn.Module, int], Tensor], micro_batches: int) -> Reference:
    """Plain accumulation, in this process: forward and backward of `loss(model, micro)` for each micro-batch, with
    the weight in a step. Leaves gradients, buffers and generators as they were."""
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
    """The gradients of every trainable parameter of this process (not on the meta device); not copies."""
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not parameter.is_meta
    }


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host: a model that fills the device must still be certified."""
    return {
        name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items() if not tensor.is_meta
    }


def summary(certificate: Certificate) -> str:
    """A short line for the screen if everything passes; empty if there is more to report."""
    numbers = [row for report in certificate.reports for row in report.rows]
    if not certificate.passes or not all(row.finite for row in numbers):
        return ""
    return f"{certificate.layout} check passed: gradients match one process"


def message(certificate: Certificate) -> str:
    """The whole result in one line, for the log."""
    parts = [describe(report, certificate.micro_batches) for report in certificate.reports]
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
                "comparisons": [report_json(report) for report in certificate.reports],
            },
            indent=1,
            allow_nan=False,
        )
        + "\n"
    )


def error_of(certificate: Certificate) -> UserError | None:
    """The error to stop with; None if everything passes."""
    for report in certificate.reports:
        if (row := report.first_wrong) is not None:
            text = describe_wrong(report, row, certificate.micro_batches)
            return UserError(text, _fix(report, row, certificate.hint))
    return None


def _fix(report: EqualityReport, row: Row, hint: str) -> str:
    end = "certificate.json in the run folder has every number; parallel.layout = single lays nothing out"
    if report.subject.exact:
        return f"look for code in forward that writes to it, or replaces it with a different tensor; {end}"
    if row.rank < 0:
        return f"parallel.split leaves it out: assign every module of the model to a stage; {end}"
    if row.scaled_by:
        return f"look for a loss or a hook that divides or multiplies by the number of micro-batches or ranks; {end}"
    if hint:
        return f"{hint}; {end}"
    return (
        "look for a forward that draws random numbers of its own, stores values from one call to the next, writes "
        "to its input, or uses one parameter in two stages; or, in bf16, a kernel that does not repeat its own "
        f"result (does --train.precision fp32 pass?); {end}"
    )


def certify(
    step: TrainStep, layout: ReferenceModel, batch: Batch, index: int, folder: Path | None, log: Log
) -> None:
    """Certifies the layout by step `index` on this process's batch. All processes call it."""
    strategy, world = step.strategy, step.world
    with step.uncompiled():  # compiled kernels round differently from those of the reference
        before = copied(dict(step.state.module.named_buffers()))
        gradients, moved = _recomputed(step, batch, index)
        expected = _reference(step, layout, batch, index)
        if expected is None:
            _log_uncertified(strategy.description, folder, log)
            return
        mine = _reports(step, gradients, moved, before, expected)
        if layout.allows_unrepeatable and any(world.all_gather_object(_is_wrong(mine))):
            again = Reference(*_recomputed(step, batch, index))
            if any(world.all_gather_object(_is_wrong(_reports(step, gradients, moved, before, again)))):
                _log_uncertified(strategy.description, folder, log, NOT_REPEATED)
                return
    every: list[list[EqualityReport]] = world.all_gather_object(mine)
    certificate = Certificate(
        tuple(merge(reports) for reports in zip(*every, strict=True)),
        strategy.micro_batches * strategy.grid.replicas,
        layout.title,
        strategy.description,
        layout.hint,
    )
    _conclude(certificate, folder, log)


def _conclude(certificate: Certificate, folder: Path | None, log: Log) -> None:
    """Stores and logs the certificate; stops the run where it does not pass."""
    _store(as_json(certificate), folder, log)
    if short := summary(certificate):
        log(short)
    log(message(certificate), show=not short)
    if (error := error_of(certificate)) is not None:
        raise error


def _recomputed(
    step: TrainStep, batch: Batch, index: int
) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """The gradients and buffers after a step, whole and on the host, as far as this process computes them."""
    module = step.state.module
    gradients: dict[str, Tensor | None] = {}
    buffers: dict[str, Tensor] = {}

    def inspect() -> None:
        for name, gradient in gradients_of(module).items():
            whole = None if gradient is None else full_tensor(gradient, step.world)
            gradients[name] = None if whole is None else whole.detach().to("cpu", copy=True)
        buffers.update(copied(dict(module.named_buffers())))

    step.recompute(batch, index, inspect=inspect)
    return gradients, buffers


def _reference(step: TrainStep, layout: ReferenceModel, batch: Batch, index: int) -> Reference | None:
    """Plain accumulation over the micro-batches of all replicas. None if the whole model does not fit on a device."""
    strategy, world, grid = step.strategy, step.world, step.strategy.grid
    whole = layout.whole()
    # Before the forward, in which processes may wait for each other.
    if not _all_fit(whole is None or _fits(lambda: whole.to(world.device).train()) is not None, world):
        return None
    pieces = split_batch(batch, strategy.micro_batches)
    drawing = any(world.all_gather_object(step.draws.active))

    def loss(model: nn.Module, micro: int) -> Tensor:
        forward = layout.forward(model, step.draws, index, micro, drawing)
        step.objective.at(index)
        sums = step.loss_sums(forward, pieces[micro])
        scaled: Tensor = step.state.scaler.scale(sums.loss * (strategy.weight / step.global_batch))
        return scaled

    made: Reference | None = Reference({}, {})
    if whole is not None:
        with step.undone():  # an objective may store data of every batch
            made = _fits(lambda: reference(whole, loss, len(pieces)), _communicates(whole, step))
    if not _all_fit(made is not None, world):
        return None
    assert made is not None
    if whole is not None:
        made = replace(made, gradients=_summed(made.gradients, whole, grid.peers, strategy.weight))
    return made if grid.places == 1 else _broadcast(made, step.state.module, grid)


def _summed(gradients: Values, whole: nn.Module, peers: World, weight: float) -> dict[str, Tensor | None]:
    """The sum over the replicas, divided by the weight of their losses. A gradient that only some replicas have is
    zero on the others. All processes that computed a reference call it."""
    parameters = dict(whole.named_parameters())
    here = [name for name, each in gradients.items() if each is not None]
    anywhere = {name for names in peers.all_gather_object(here) for name in names}
    return {
        name: peers.all_reduce(torch.zeros_like(parameters[name]) if each is None else each).div_(weight)
        if name in anywhere
        else None
        for name, each in gradients.items()
    }


def _broadcast(made: Reference, module: nn.Module, grid: Grid) -> Reference:
    """Sends the reference from the last process of a replica, which computes the loss, to the others."""
    last = grid.places - 1
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    here = [name for name, each in made.gradients.items() if each is not None]

    def received(mine: Tensor | None, like: Tensor) -> Tensor:
        tensor = (
            torch.empty(like.shape, dtype=like.dtype) if mine is None else mine.detach().cpu().contiguous()
        )
        return grid.down.broadcast_host(tensor, last)

    gradients: dict[str, Tensor | None] = dict.fromkeys(parameters)
    for name in grid.down.all_gather_object(here)[last]:
        gradients[name] = received(made.gradients.get(name), parameters[name])
    buffers = {name: received(made.buffers.get(name), each) for name, each in module.named_buffers()}
    return Reference(gradients, buffers)


def _reports(
    step: TrainStep, gradients: Values, moved: Values, before: Values, expected: Reference
) -> list[EqualityReport]:
    """Compares this process's gradients and buffers after the step, and its buffers after the rehearsal."""
    module = step.state.module
    parameters = [name for name, each in module.named_parameters() if each.requires_grad]
    buffers = [name for name, _ in module.named_buffers()]
    loose = step.world.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
    compared = partial(compare, precision=step.precision, loose=loose, rank=step.world.rank)
    return [
        compared(gradients, expected.gradients, parameters, subject=Subject.GRADIENTS),
        compared(moved, expected.buffers, buffers, subject=Subject.BUFFERS_MOVED),
        compared(copied(dict(module.named_buffers())), before, buffers, subject=Subject.BUFFERS_UNTOUCHED),
    ]


def _is_wrong(reports: Sequence[EqualityReport]) -> bool:
    return any(report.wrong for report in reports)


def _fits(work: Callable[[], T], communicates: bool = False) -> T | None:
    """The result; None if the device has no memory for it. Work that `communicates` with other processes raises the
    error instead: they would wait for this one."""
    try:
        return work()
    except torch.OutOfMemoryError:
        if communicates:
            raise
        return None


def _all_fit(here: bool, world: World) -> bool:
    return all(world.all_gather_object(here))


def _communicates(whole: nn.Module, step: TrainStep) -> bool:
    """Whether a forward waits for other processes, in a norm or in the loss."""
    return step.objective.meets or any(
        isinstance(layer, WorldNorm | nn.SyncBatchNorm) for layer in whole.modules()
    )


def _log_uncertified(description: str, folder: Path | None, log: Log, why: str = TOO_LARGE) -> None:
    _store(json.dumps({"passes": None, "layout": description, "words": why}, indent=1) + "\n", folder, log)
    log(f"WARNING: no certificate: {why}")


def _store(text: str, folder: Path | None, log: Log) -> None:
    """Does not stop the run if the disk is full: the log has the result, too."""
    if folder is None:
        return
    try:
        write_text(folder / FILE, text)
    except OSError as error:
        log(f"WARNING: the certificate is not stored, {error.strerror or error}: {folder / FILE}")
