"""Proves a layout before training: one step of it beside plain accumulation in one process, on the run's own batch.

Promises: the whole model is computed where the loss is, with the weights and random numbers of the step; each process
compares what it holds; the run is left as it was. What was found is said in a line, logged and stored as
certificate.json in full, and stops the run where it is more than rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from drumline.core.files import write_text
from drumline.data.feed.batch import Batch
from drumline.models.tapped import Tapped
from drumline.parallel.holding import Holding, Whole
from drumline.parallel.layout import micro_batches_of
from drumline.parallel.local import joined
from drumline.parallel.norm import WorldNorm
from drumline.parallel.pipeline.instructions import Span
from drumline.parallel.world import World
from drumline.train.certificate import (
    Certificate,
    Reference,
    as_json,
    copied,
    gradients_of,
    reference,
    refuse,
    summary,
    words,
)
from drumline.train.equality import Claim, Values, Verdict, compare, merge
from drumline.train.model_draws import ModelDraws
from drumline.train.staged import Laid
from drumline.train.step import TrainStep

T = TypeVar("T")


class Log(Protocol):
    """A line for the log, and for the screen unless it is details."""

    def __call__(self, text: str, show: bool = True) -> None: ...


FILE = "certificate.json"
TOO_LARGE = (
    "the whole model does not fit on one device beside what the layout holds there. A smaller model of the same kind "
    "can be proved"
)
NOT_REPEATED = (
    "the model does not repeat its own step: it keeps something from one call to the next, or draws random numbers "
    "that no seed reaches"
)


def prove(
    laid: Laid,
    step: TrainStep,
    batch: Batch,
    index: int,
    holding: Holding,
    folder: Path | None,
    log: Log,
) -> list[Span]:
    """All ranks call it, with the batch of step `index`. Gives when this process did what in that step."""
    exchange, world = laid.exchange, laid.exchange.grid.world
    before = copied(dict(step.state.module.named_buffers()))
    exchange.recording = True
    gradients, moved = _seen(step, batch, index)
    exchange.recording = False
    drawing = any(world.all_gather_object(step.draws.active))
    theirs = _reference(laid, step, batch, index, holding, drawing)
    if theirs is None:
        _tell_unproved(laid.words[0], folder, log)
        return exchange.spans()
    mine = _verdicts(step, gradients, moved, before, theirs)
    _tell(mine, exchange.shape.micro_batches, laid.words[0], world, folder, log)
    return exchange.spans()


def prove_sharded(
    whole: nn.Module,
    step: TrainStep,
    batch: Batch,
    index: int,
    accumulate: int,
    holding: Holding,
    folder: Path | None,
    log: Log,
) -> None:
    """The same for FSDP: `whole` is a copy of the module as it was before it was sharded. All ranks call it."""
    module, world = step.state.module, step.world
    before = copied(dict(module.named_buffers()))
    gradients, moved = _seen(step, batch, index)
    state = holding.collect({"all": dict(module.state_dict())})
    layout = f"layout fsdp over {world.size} processes"
    # First: what is on the host cannot travel over NCCL.
    if not all(world.all_gather_object(_fits(lambda: whole.to(world.device).train()) is not None)):
        _tell_unproved(layout, folder, log)
        return
    live = {"all": dict(whole.state_dict())}
    Whole(world).spread(state if world.is_rank_zero else None, live, Path("the run itself"))
    theirs = _accumulated(whole, step, batch, index, accumulate)
    if theirs is None:
        _tell_unproved(layout, folder, log)
        return
    mine = _verdicts(step, gradients, moved, before, theirs)
    _tell(mine, world.size * accumulate, layout, world, folder, log)


def prove_replicated(
    step: TrainStep,
    batch: Batch,
    index: int,
    accumulate: int,
    folder: Path | None,
    log: Log,
) -> None:
    """The same for DDP: every process has the whole model, and computes its share without DDP too; uncompiled, for
    compiled kernels round otherwise. A model that cannot even repeat its own step is told of, and trained all the
    same: `ddp` is what one gets without asking. All ranks call it."""
    module, world = step.state.module, step.world
    layout = f"layout ddp over {world.size} processes"
    before = copied(dict(module.named_buffers()))
    with torch.compiler.set_stance("force_eager"):
        gradients, moved = _seen(step, batch, index)
        theirs = _accumulated(module, step, batch, index, accumulate)
        if theirs is None:
            _tell_unproved(layout, folder, log)
            return
        mine = _verdicts(step, gradients, moved, before, theirs)
        if any(world.all_gather_object(_wrong(mine))):
            again = Reference(*_seen(step, batch, index))
            if any(world.all_gather_object(_wrong(_verdicts(step, gradients, moved, before, again)))):
                _tell_unproved(layout, folder, log, NOT_REPEATED)
                return
    _tell(mine, world.size * accumulate, layout, world, folder, log)


def _seen(step: TrainStep, batch: Batch, index: int) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """The gradients and buffers that a step leaves, on the host: of what this process computes, each of them whole.
    The run is left as it was."""
    module = step.state.module
    gradients: dict[str, Tensor | None] = {}
    buffers: dict[str, Tensor] = {}

    def look() -> None:
        for name, gradient in gradients_of(module).items():
            whole = None if gradient is None else joined(gradient, step.world)
            gradients[name] = None if whole is None else whole.detach().to("cpu", copy=True)
        buffers.update(copied(dict(module.named_buffers())))

    step.replay(batch, index, look=look)
    return gradients, buffers


def _accumulated(
    whole: nn.Module, step: TrainStep, batch: Batch, index: int, accumulate: int
) -> Reference | None:
    """Each process's share of the batch by the whole model, and the mean of all. None where it does not fit."""
    world = step.world
    step.draws.at(index)
    step.draws.switch(0)
    pieces = micro_batches_of(batch, accumulate)
    with step.undone():  # an objective may keep something of every batch it sees
        made = _fits(
            lambda: reference(
                whole, lambda model, micro: _whole_loss(step, pieces[micro], index, model), accumulate
            ),
            _meets(whole, step),
        )
    if not all(world.all_gather_object(made is not None)):
        return None
    assert made is not None
    summed = _summed(made.gradients, whole, world)
    for gradient in summed.values():
        if gradient is not None:
            gradient.div_(world.size)
    return replace(made, gradients=summed)


def _wrong(verdicts: list[Verdict]) -> bool:
    return any(verdict.wrong for verdict in verdicts)


def _verdicts(
    step: TrainStep, gradients: Values, moved: Values, before: Values, theirs: Reference
) -> list[Verdict]:
    """What this rank has to say of its step's gradients and buffers, and of what the rehearsal left."""
    module = step.state.module
    parameters = [name for name, each in module.named_parameters() if each.requires_grad]
    buffers = [name for name, _ in module.named_buffers()]
    loose = step.world.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
    judged = partial(compare, autocast=step.autocast, loose=loose, rank=step.world.rank)
    return [
        judged(gradients, theirs.gradients, parameters, claim=Claim.GRADIENTS),
        judged(moved, theirs.buffers, buffers, claim=Claim.BUFFERS_MOVED),
        judged(copied(dict(module.named_buffers())), before, buffers, claim=Claim.BUFFERS_UNTOUCHED),
    ]


def _tell(
    mine: list[Verdict],
    micro_batches: int,
    layout: str,
    world: World,
    folder: Path | None,
    log: Log,
) -> None:
    """What all ranks found, as one certificate."""
    everybody: list[list[Verdict]] = world.all_gather_object(mine)
    certificate = Certificate(
        tuple(merge(verdicts) for verdicts in zip(*everybody, strict=True)), micro_batches, layout
    )
    _store(as_json(certificate), folder, log)
    if short := summary(certificate):
        log(short)
    log(words(certificate), show=not short)
    if (error := refuse(certificate)) is not None:
        raise error


def _fits(work: Callable[[], T], meets: bool = False) -> T | None:
    """What the work gives; None where the device has no room for it. Where it `meets` that of other processes, that
    ends the run: they would wait for one that has given up."""
    try:
        return work()
    except torch.OutOfMemoryError:
        if meets:
            raise
        return None


def _meets(whole: nn.Module, step: TrainStep) -> bool:
    """Whether a forward waits for other processes: in a norm, or in the loss."""
    return step.objective.meets or any(
        isinstance(part, WorldNorm | nn.SyncBatchNorm) for part in whole.modules()
    )


def _tell_unproved(layout: str, folder: Path | None, log: Log, why: str = TOO_LARGE) -> None:
    _store(json.dumps({"passes": None, "layout": layout, "words": why}, indent=1) + "\n", folder, log)
    log(f"WARNING: no certificate: {why}")


def _store(text: str, folder: Path | None, log: Log) -> None:
    """A full disk is no reason not to train: what was found is in the log too."""
    if folder is None:
        return
    try:
        write_text(folder / FILE, text)
    except OSError as error:
        log(f"WARNING: the certificate is not stored, {error.strerror or error}: {folder / FILE}")


def _reference(
    laid: Laid, step: TrainStep, batch: Batch, index: int, holding: Holding, drawing: bool
) -> Reference | None:
    """Computed where the loss is, and told to the others of the replica. None where it does not fit."""
    grid, module = laid.exchange.grid, step.state.module
    whole = laid.twin.pop() if laid.twin else None
    state = holding.collect({"all": _state(module)})
    live = {"all": dict(whole.state_dict()) if whole is not None else {}}
    holding.spread(state if grid.world.is_rank_zero else None, live, Path("the run itself"))
    made: Reference | None = Reference({}, {})
    if whole is not None:
        loss = partial(
            _loss, laid, step, micro_batches_of(batch, laid.exchange.shape.micro_batches), index, drawing
        )
        with step.undone():
            made = _fits(
                lambda: reference(
                    whole.to(grid.world.device).train(), loss, laid.exchange.shape.micro_batches
                ),
                _meets(whole, step),
            )
    if not all(grid.world.all_gather_object(made is not None)):
        return None
    assert made is not None
    if whole is not None:
        made = replace(made, gradients=_summed(made.gradients, whole, grid.peers))
    names = {name: each for name, each in module.named_parameters() if each.requires_grad}
    last = grid.places - 1
    given: list[str] = grid.down.all_gather_object(
        [name for name, each in made.gradients.items() if each is not None]
    )[last]
    gradients: dict[str, Tensor | None] = dict.fromkeys(names)
    for name in given:
        gradients[name] = _told(made.gradients.get(name), names[name], grid.down.broadcast_host, last)
    buffers = {
        name: _told(made.buffers.get(name), each, grid.down.broadcast_host, last)
        for name, each in module.named_buffers()
    }
    return Reference(gradients, buffers)


def _summed(gradients: Values, whole: nn.Module, world: World) -> dict[str, Tensor | None]:
    """Over the processes, which all call it. One that only some have counts as zeros with the others."""
    parameters = dict(whole.named_parameters())
    here = [name for name, each in gradients.items() if each is not None]
    somewhere = {name for names in world.all_gather_object(here) for name in names}
    return {
        name: world.all_reduce(torch.zeros_like(parameters[name]) if each is None else each)
        if name in somewhere
        else None
        for name, each in gradients.items()
    }


def _told(
    mine: Tensor | None, like: Tensor, broadcast: Callable[[Tensor, int], Tensor], source: int
) -> Tensor:
    tensor = torch.empty(like.shape, dtype=like.dtype) if mine is None else mine.detach().cpu().contiguous()
    return broadcast(tensor, source)


def _loss(
    laid: Laid, step: TrainStep, pieces: list[Batch], index: int, drawing: bool, whole: nn.Module, micro: int
) -> Tensor:
    """Of one micro-batch through the whole model; where it draws random numbers, with those of the stages."""
    model: Any = _Keyed(laid, step, index, micro, whole) if drawing else whole
    return _whole_loss(step, pieces[micro], index, model)


def _whole_loss(step: TrainStep, piece: Batch, index: int, model: nn.Module) -> Tensor:
    step.objective.at(index)
    outcome = step.outcome(model, piece)
    loss: Tensor = step.state.scaler.scale(outcome.loss * (step.exchange.weight / step.global_batch))
    return loss


class _Keyed(nn.Module):
    """The whole model, going its own way: where a stage begins, it goes on with the random numbers of that stage."""

    def __init__(self, laid: Laid, step: TrainStep, index: int, micro: int, whole: nn.Module) -> None:
        super().__init__()
        self._laid, self._whole = laid, (whole,)
        shape, grid = laid.exchange.shape, laid.exchange.grid
        first = (grid.replica * shape.micro_batches + micro) * shape.stages
        self._draws = ModelDraws(step.draws.seed, range(first, first + shape.stages), grid.world.device)
        self._draws.active = True
        self._draws.at(index)

    def forward(self, *inputs: Any) -> Any:
        (whole,) = self._whole
        root = self._laid.cut.root(whole)
        prefix = "model." if isinstance(root, Tapped) else ""
        waiting = {segment.number for segment in self._laid.segments[1:]}

        def begin(stage: int, *_: Any) -> None:
            if stage in waiting:  # a module may be called again
                waiting.remove(stage)
                self._draws.switch(stage)

        handles = [
            root.get_submodule(f"{prefix}{segment.name}").register_forward_pre_hook(
                partial(begin, segment.number), prepend=True
            )
            for segment in self._laid.segments[1:]
        ]
        self._draws.switch(0)
        try:
            return whole(*inputs)
        finally:
            for handle in handles:
                handle.remove()


def _state(module: nn.Module) -> dict[str, Tensor]:
    """What this process holds, by name."""
    return {name: tensor for name, tensor in module.state_dict().items() if not tensor.is_meta}
