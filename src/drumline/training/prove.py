"""Makes a run's certificate: its layout against plain accumulation in one process, on the run's own first batch.

Promises: the reference has the weights and random numbers of the step; each process compares what it holds; the run
is left as it was. The result is logged in one line, stored in full as certificate.json, and stops the run where the
difference is more than rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from drumline.core.files import write_text
from drumline.data.feed.batch import Batch
from drumline.parallel.local import full_tensor
from drumline.parallel.norm import WorldNorm
from drumline.parallel.strategy import split_batch
from drumline.parallel.world import Grid, World
from drumline.training.certificate import (
    Certificate,
    Reference,
    as_json,
    copied,
    gradients_of,
    message,
    reference,
    refuse,
    summary,
)
from drumline.training.equality import Claim, Values, Verdict, compare, merge
from drumline.training.step import TrainStep

T = TypeVar("T")


class Log(Protocol):
    """Writes a line to the log, and to the screen unless it is details."""

    def __call__(self, text: str, show: bool = True) -> None: ...


FILE = "certificate.json"
TOO_LARGE = (
    "the whole model does not fit on one device next to what the layout holds there. A smaller model of the same "
    "kind can be certified"
)
NOT_REPEATED = (
    "the model does not repeat its own step: it keeps something from one call to the next, or draws random numbers "
    "that no seed reaches"
)


def prove(step: TrainStep, batch: Batch, index: int, folder: Path | None, log: Log) -> None:
    """Certifies the layout by step `index` on this process's batch. All processes call it."""
    strategy, world = step.strategy, step.world
    with _uncompiled(strategy.recipe.train.compile):
        before = copied(dict(step.state.module.named_buffers()))
        gradients, moved = _replayed(step, batch, index)
        expected = _reference(step, batch, index)
        if expected is None:
            _log_uncertified(strategy.description, folder, log)
            return
        mine = _verdicts(step, gradients, moved, before, expected)
        if strategy.allows_unrepeatable and any(world.all_gather_object(_is_wrong(mine))):
            again = Reference(*_replayed(step, batch, index))
            if any(world.all_gather_object(_is_wrong(_verdicts(step, gradients, moved, before, again)))):
                _log_uncertified(strategy.description, folder, log, NOT_REPEATED)
                return
    every: list[list[Verdict]] = world.all_gather_object(mine)
    certificate = Certificate(
        tuple(merge(verdicts) for verdicts in zip(*every, strict=True)),
        strategy.micro_batches * strategy.grid.replicas,
        strategy.label or strategy.name,
        strategy.description,
        strategy.mismatch_hint,
    )
    _conclude(certificate, folder, log)


def _conclude(certificate: Certificate, folder: Path | None, log: Log) -> None:
    """Stores and logs the certificate; stops the run where it does not pass."""
    _store(as_json(certificate), folder, log)
    if short := summary(certificate):
        log(short)
    log(message(certificate), show=not short)
    if (error := refuse(certificate)) is not None:
        raise error


def _uncompiled(compiled: bool) -> AbstractContextManager[object]:
    """Compiled kernels round differently from those of the reference. (Only compiled runs import the compiler.)"""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _replayed(
    step: TrainStep, batch: Batch, index: int
) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """The gradients and buffers that a step leaves, whole and on the host, of what this process computes."""
    module = step.state.module
    gradients: dict[str, Tensor | None] = {}
    buffers: dict[str, Tensor] = {}

    def inspect() -> None:
        for name, gradient in gradients_of(module).items():
            whole = None if gradient is None else full_tensor(gradient, step.world)
            gradients[name] = None if whole is None else whole.detach().to("cpu", copy=True)
        buffers.update(copied(dict(module.named_buffers())))

    step.replay(batch, index, inspect=inspect)
    return gradients, buffers


def _reference(step: TrainStep, batch: Batch, index: int) -> Reference | None:
    """Plain accumulation over the micro-batches of all replicas. None where the whole model does not fit on a
    device."""
    strategy, world, grid = step.strategy, step.world, step.strategy.grid
    whole = strategy.reference_model()
    # Agreed on before the forward, in which processes may wait for each other.
    if not _all_fit(whole is None or _fits(lambda: whole.to(world.device).train()) is not None, world):
        return None
    pieces = split_batch(batch, strategy.micro_batches)
    drawing = any(world.all_gather_object(step.draws.active))

    def loss(model: nn.Module, micro: int) -> Tensor:
        forward = strategy.reference_forward(model, step.draws, index, micro, drawing)
        step.objective.at(index)
        outcome = step.outcome(forward, pieces[micro])
        scaled: Tensor = step.state.scaler.scale(outcome.loss * (strategy.weight / step.global_batch))
        return scaled

    made: Reference | None = Reference({}, {})
    if whole is not None:
        with step.undone():  # an objective may keep something of every batch
            made = _fits(lambda: reference(whole, loss, len(pieces)), _communicates(whole, step))
    if not _all_fit(made is not None, world):
        return None
    assert made is not None
    if whole is not None:
        made = replace(made, gradients=_summed(made.gradients, whole, grid.peers, strategy.weight))
    return made if grid.places == 1 else _broadcast(made, step.state.module, grid)


def _summed(gradients: Values, whole: nn.Module, peers: World, weight: float) -> dict[str, Tensor | None]:
    """The sum over the replicas, divided by the weight of their losses. A gradient that only some have counts as
    zeros with the others. All processes that computed a reference call it."""
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
    """The reference on every process of a replica, from the last one, where the loss is."""
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


def _verdicts(
    step: TrainStep, gradients: Values, moved: Values, before: Values, expected: Reference
) -> list[Verdict]:
    """This process's comparison of the step's gradients and buffers, and of what the rehearsal left."""
    module = step.state.module
    parameters = [name for name, each in module.named_parameters() if each.requires_grad]
    buffers = [name for name, _ in module.named_buffers()]
    loose = step.world.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
    compared = partial(compare, autocast=step.autocast, loose=loose, rank=step.world.rank)
    return [
        compared(gradients, expected.gradients, parameters, claim=Claim.GRADIENTS),
        compared(moved, expected.buffers, buffers, claim=Claim.BUFFERS_MOVED),
        compared(copied(dict(module.named_buffers())), before, buffers, claim=Claim.BUFFERS_UNTOUCHED),
    ]


def _is_wrong(verdicts: list[Verdict]) -> bool:
    return any(verdict.wrong for verdict in verdicts)


def _fits(work: Callable[[], T], communicates: bool = False) -> T | None:
    """The result; None where the device has no room for it. Work that waits for other processes ends the run instead:
    they would wait for one that has given up."""
    try:
        return work()
    except torch.OutOfMemoryError:
        if communicates:
            raise
        return None


def _all_fit(here: bool, world: World) -> bool:
    return all(world.all_gather_object(here))


def _communicates(whole: nn.Module, step: TrainStep) -> bool:
    """Whether a forward waits for other processes: in a norm, or in the loss."""
    return step.objective.meets or any(
        isinstance(layer, WorldNorm | nn.SyncBatchNorm) for layer in whole.modules()
    )


def _log_uncertified(description: str, folder: Path | None, log: Log, why: str = TOO_LARGE) -> None:
    _store(json.dumps({"passes": None, "layout": description, "words": why}, indent=1) + "\n", folder, log)
    log(f"WARNING: no certificate: {why}")


def _store(text: str, folder: Path | None, log: Log) -> None:
    """A full disk is no reason not to train: the log has the result, too."""
    if folder is None:
        return
    try:
        write_text(folder / FILE, text)
    except OSError as error:
        log(f"WARNING: the certificate is not stored, {error.strerror or error}: {folder / FILE}")
