"""Lays a model over the processes of a world: alone, DataParallel, or DistributedDataParallel.

Promises: gradients are averaged over ranks by torch's DDP; after each step the running statistics of all ranks
are averaged too, so every rank holds the same model at every step boundary, and a checkpoint of one is a
checkpoint of all. DDP rebuilds its buckets after its first backward; a rehearsed step (train/step.py) makes
that happen before training, so a resumed run reduces in the same order as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from drumline.core.errors import UserError
from drumline.data.feed.batch import Batch
from drumline.data.feed.sampler import bounds
from drumline.parallel.pipeline.instructions import Kind, Span
from drumline.parallel.pipeline.record import Recorder, timed
from drumline.parallel.world import World

# torch 2.13 renames the option; `BufferMean` does what it would do, with every rank's statistics.
_BUFFER_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def data_parallel_word(gpus: int) -> str:
    """What torch's DataParallel costs, said plainly."""
    if gpus < 2:
        return "layout dp: DataParallel spreads over several GPUs; here it changes nothing"
    return (
        f"layout dp: one Python process drives {gpus} GPUs; GPU 0 gathers every output and holds extra memory, and "
        f"the model is copied at each step. `--parallel.layout ddp --parallel.processes {gpus}` is faster"
    )


def resolve_layout(wanted: str, world: World) -> str:
    """`auto` to the layout that fits the world; refuses what cannot work."""
    if wanted == "auto":
        return "ddp" if world.size > 1 else "single"
    if wanted in ("single", "dp", "model") and world.size > 1:
        raise UserError(
            f"parallel.layout = {wanted} runs in one process, but {world.size} were started",
            "use ddp or pipeline, or start one process",
        )
    if wanted == "ddp" and world.size == 1:
        return "single"
    return wanted


def lay_out(module: nn.Module, layout: str, world: World) -> nn.Module:
    """The module whose forward the step calls."""
    if layout == "ddp":
        buffers: dict[str, Any] = {_BUFFER_OPTION: False}
        device_ids = [world.device] if world.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=device_ids, gradient_as_bucket_view=True, **buffers)
    if layout == "dp":
        return DataParallel(module)
    return module


def refuse_hooked(module: nn.Module, layout: str) -> None:
    """Where parameters are laid elsewhere, as new ones, a hook on the old would be lost without a word, and what it
    does to gradients with it."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UserError(
                f"parallel.layout = {layout}: the parameter {name} has a hook, which would stay behind when it is "
                "laid where it is computed",
                "do the same in forward or in the objective, or use --parallel.layout ddp",
            )


class Passes(Protocol):
    """What a step makes of a piece of its batch."""

    def images(self, batch: Batch) -> torch.Tensor:
        """What the model reads."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """What backward starts from, after the model's forward."""


class Draws(Protocol):
    """The random numbers of a step's pieces."""

    active: bool
    """Whether the model draws any."""

    def switch(self, place: int, device: torch.device | None = None) -> None:
        """From now on the piece at this place in `Exchange.parts` draws, on this device if not the process's own."""


class Exchange(Protocol):
    """How a step cuts this process's part of the global batch, and brings gradients and buffers together."""

    weight: float
    """What a sum over samples, divided by the global batch, is weighted by."""
    parts: Sequence[int]
    """Numbers of the pieces with random numbers of their own."""
    devices: Sequence[torch.device]
    """Those it computes on, besides the process's own."""

    def gradients(self, batch: Batch, passes: Passes, draws: Draws) -> None:
        """Forward and backward of each piece with its own random numbers; afterwards `.grad` is the gradient of the
        global batch."""

    def buffers(self) -> None:
        """Afterwards every process that holds a buffer holds the same."""

    def settle(self) -> list[torch.Tensor]:
        """After a rehearsed step: the trainable parameters that got no gradient."""

    def norm(self) -> torch.Tensor:
        """The length of the whole model's gradient."""

    def agree(self, flag: torch.Tensor) -> None:
        """Makes the flag the largest of those of all who hold other parts of the model, in place."""


class Everything:
    """What is plain where every process holds the whole model and its whole gradient."""

    devices: Sequence[torch.device] = ()

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def norm(self) -> torch.Tensor:
        gradients = [each.grad for each in self._module.parameters() if each.grad is not None]
        return nn.utils.get_total_norm(gradients, foreach=True)

    def agree(self, flag: torch.Tensor) -> None:
        """All see the same."""


class Recorded:
    """Forward and backward of whole micro-batches, noted when somebody wants to see them."""

    def __init__(self, world: World) -> None:
        self.recording = False
        """Whether the next step notes when each thing was done."""
        self._recorder = Recorder(world.rank, world.device)

    def begin(self) -> None:
        """Before the first micro-batch of a step."""
        if self.recording:
            self._recorder.start()

    def both_ways(self, passes: Passes, piece: Batch, micro: int) -> None:
        """One micro-batch."""
        recorder = self._recorder if self.recording else None
        loss = timed(recorder, Kind.FORWARD, micro, lambda: passes.loss(piece))
        timed(recorder, Kind.BACKWARD, micro, loss.backward)

    def spans(self) -> list[Span]:
        """When this process did what, in the last recorded step."""
        return self._recorder.spans()


class Averaged(Everything, Recorded):
    """The plain exchange: micro-batches, gradients averaged by DDP, running statistics averaged after it."""

    def __init__(self, module: nn.Module, forward: nn.Module, world: World, accumulate: int = 1) -> None:
        Everything.__init__(self, module)
        Recorded.__init__(self, world)
        # DDP divides by the number of ranks; a sum over samples weighted so is the mean over the global batch.
        self.weight = float(world.size)
        self.parts: Sequence[int] = (world.rank,)
        self.buffers = BufferMean(module, world)
        self._forward, self._accumulate = forward, accumulate

    def gradients(self, batch: Batch, passes: Passes, draws: Draws) -> None:
        """One micro-batch after the other; DDP exchanges with the last."""
        draws.switch(0)
        self.begin()
        for number, piece in enumerate(micro_batches_of(batch, self._accumulate)):
            with without_sync(self._forward, last=number == self._accumulate - 1):
                self.both_ways(passes, piece, number)

    def settle(self) -> list[torch.Tensor]:
        return [
            parameter
            for parameter in self._module.parameters()
            if parameter.requires_grad and parameter.grad is None
        ]


def micro_batches_of(batch: Batch, count: int) -> list[Batch]:
    """Its rows in so many pieces, as even as can be; mixed pairs stay together."""
    if count == 1:
        return [batch]
    cuts = bounds(len(batch.labels), count, unit=2 if batch.mix.shape[1] else 1)
    return [Batch(*(tensor[first:last] for tensor in batch)) for first, last in pairwise(cuts)]


def used_somewhere(parameters: Sequence[nn.Parameter], world: World) -> list[bool]:
    """Which of them have a gradient on this process or another. All processes call it."""
    here = torch.tensor([each.grad is not None for each in parameters])
    found: list[bool] = world.all_gather_integers(here).any(dim=0).tolist()
    return found


def without_sync(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Holds back DDP's gradient exchange for every micro-batch but the last."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


class BufferMean:
    """Averages the floating-point buffers (running statistics) over the ranks, in one message. Those of a part that
    is in evaluation mode stay: nothing changes them, and a mean of equal numbers may round."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self.world = world
        found = {
            id(buffer): buffer
            for part in module.modules()
            if part.training
            for buffer in part.buffers(recurse=False)
            if buffer.is_floating_point() and not buffer.is_meta  # another process's
        }
        self.buffers = list(found.values())

    @torch.no_grad()
    def __call__(self) -> None:
        if self.world.size == 1 or not self.buffers:
            return
        flat = torch.cat([buffer.reshape(-1) for buffer in self.buffers])
        # Divided after the sum: a constant table of whole numbers then keeps its values.
        self.world.all_reduce(flat).div_(self.world.size)
        parts = flat.split([buffer.numel() for buffer in self.buffers])
        torch._foreach_copy_(
            self.buffers, [part.view_as(b) for part, b in zip(parts, self.buffers, strict=True)]
        )
