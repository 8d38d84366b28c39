"""A step's way through a model in stages: the exchange of `train/step.py` for layouts model and pipeline.

Promises: `.grad` is that of the replica's micro-batches accumulated in order, summed over the replicas; a stage's
gradients travel to the other replicas as soon as they are complete, while other stages still compute. Random numbers
of a stage depend on (seed, step, replica, micro-batch, stage) alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import UserError
from drumline.data.feed.batch import Batch
from drumline.parallel.grid import Grid
from drumline.parallel.layout import BufferMean, Draws, Everything, Passes, micro_batches_of, used_somewhere
from drumline.parallel.pipeline.boundary import StageModule, TensorSpec
from drumline.parallel.pipeline.execute import Lane, run_lanes
from drumline.parallel.pipeline.instructions import Span
from drumline.parallel.pipeline.mailbox import LaneDevice, Mailbox
from drumline.parallel.pipeline.norm import commit_statistics, forget_statistics
from drumline.parallel.pipeline.record import Recorder
from drumline.parallel.pipeline.schedule import instruction_lists
from drumline.parallel.pipeline.shape import Shape
from drumline.parallel.pipeline.transport import ProcessTransport, Transport
from drumline.parallel.world import Pending, World

BUCKET_BYTES = 25 * 2**20
"""Gradients that go to the other replicas in one message."""


Ahead = Callable[[Sequence[Batch], Callable[[Batch], Tensor]], None]
"""Is given the pieces of a step, and what makes images of one."""


class Tail(nn.Module):
    """Stands for the whole model at its end: an objective that calls it gets what the last stage has given, with what
    the task does after that."""

    def __init__(self, after: Callable[..., Any]) -> None:
        super().__init__()
        self.after = after
        self.given: Any = None

    def forward(self, images: Tensor, *others: Any) -> Any:
        given, self.given = self.given, None
        assert given is not None, "the last stage has not been computed"
        return self.after(given, *others)


@dataclass(frozen=True)
class Staged:
    """A model in stages, as far as this process computes them."""

    module: nn.Module
    """All that is trained; tensors of stages that other processes compute are on the meta device."""
    stages: Mapping[int, StageModule]
    parameters: Mapping[int, Sequence[nn.Parameter]]
    """Of each of these stages; what is trained beside the model belongs to the last."""
    tail: Tail
    specs: Callable[[int, int], Sequence[TensorSpec]]
    """What enters a stage, by the number of samples."""
    devices: Sequence[torch.device]
    """Of the lanes of this process."""
    autocast: torch.dtype | None
    reads_images: bool
    """Whether the objective looks at the images too, as a teacher does."""
    recomputes: bool = False
    """Whether blocks are computed once more in the backward, and draw what they drew."""
    ahead: Ahead | None = None
    """What is done with a step's micro-batches before the stages see them."""


class Pipelined(Everything):
    """Runs the lanes of this process: one, or all of a pipeline in one process."""

    def __init__(self, staged: Staged, shape: Shape, grid: Grid) -> None:
        super().__init__(staged.module)
        self.staged, self.shape, self.grid = staged, shape, grid
        self.weight = 1.0
        self.devices = staged.devices
        self.lists = instruction_lists(
            shape.schedule, shape.lanes, shape.chunks, shape.micro_batches, reduces=shape.replicas > 1
        )
        self._own = sorted(staged.stages)
        first = grid.replica * shape.micro_batches * shape.stages
        self.parts: Sequence[int] = [
            first + micro * shape.stages + stage
            for micro in range(shape.micro_batches)
            for stage in self._own
        ]
        self._box = (
            None if shape.over_processes else Mailbox([LaneDevice.on(device) for device in staged.devices])
        )
        transports: Sequence[Transport] = (
            self._box.transports if self._box else (ProcessTransport(grid.down, grid.up),)
        )
        numbers = range(shape.lanes) if self._box else (grid.place,)
        self._sizes: list[int] = []
        self.lanes = [
            Lane(
                self.lists[number],
                {stage: each for stage, each in staged.stages.items() if stage % shape.lanes == number},
                shape.stages - 1,
                self._entering,
                transport,
                device,
                staged.parameters,
            )
            for number, transport, device in zip(numbers, transports, staged.devices, strict=True)
        ]
        self._recorders = [
            Recorder(number, device) for number, device in zip(numbers, staged.devices, strict=True)
        ]
        self.recording = False
        """Whether the next step notes when each thing was done."""
        self.current: dict[int, tuple[int, Batch]] = {}
        """What each thread computes at the moment, for those who look on: the stage, and the piece of the batch."""
        self._sum = GradientSum(staged.parameters, grid.peers, staged.module)
        self.buffers = BufferMean(staged.module, grid.peers)
        # One generator serves all lanes of a process: a stage that draws has it to itself.
        self._drawing = threading.Lock()

    def gradients(self, batch: Batch, passes: Passes, draws: Draws) -> None:
        """One micro-batch after the other through the stages, many at a time."""
        pieces = micro_batches_of(batch, self.shape.micro_batches)
        self._sizes = [len(piece.labels) for piece in pieces]
        # Shapes are found here, once: that swaps tensors of the model, which lanes compute with.
        for size in set(self._sizes):
            self.staged.specs(0, size)
        entry, tail = self.lanes[0].device, self.staged.tail

        def feed(micro: int) -> Tensor:
            return passes.images(pieces[micro]).to(entry, non_blocking=True)

        def score(micro: int, output: Any) -> Tensor:
            tail.given = output
            return passes.loss(pieces[micro] if self.staged.reads_images else without_pixels(pieces[micro]))

        @contextmanager
        def around(stage: int, micro: int) -> Iterator[None]:
            with self._drawing if draws.active and self._box else nullcontext():
                self.current[threading.get_ident()] = stage, pieces[micro]
                device = self.lanes[stage % len(self.lanes)].device
                draws.switch(micro * len(self._own) + self._own.index(stage), device)
                with self.autocast():
                    yield

        if self.staged.ahead is not None:
            self.staged.ahead(pieces, passes.images)
        if self._box and self.staged.recomputes and draws.active:
            for lane in self.lanes:
                lane.around_backward = self._drawing
        forget_statistics(self._module)
        recorders = self._recorders if self.recording else None
        if self._box is not None:
            run_lanes(self._box, self.lanes, feed, score, around, self._sum.begin, recorders)
        else:
            if recorders:
                recorders[0].start()
            self.lanes[0].run(feed, score, around, self._sum.begin, recorders[0] if recorders else None)
        self._sum.finish()
        self.current.clear()
        commit_statistics(self._module)

    def autocast(self) -> torch.autocast:
        """The arithmetic of every stage."""
        dtype = self.staged.autocast
        kind = self.staged.devices[0].type
        return torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None)

    def spans(self) -> list[Span]:
        """When this process's lanes did what, in the last recorded step."""
        return [span for recorder in self._recorders for span in recorder.spans()]

    def named_stages(self) -> dict[int, list[tuple[str, nn.Parameter]]]:
        """The parameters of each stage of this process, by their names."""
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        return {
            stage: [(names[id(each)], each) for each in parameters]
            for stage, parameters in self.staged.parameters.items()
        }

    def settle(self) -> list[Tensor]:
        return [
            parameter
            for parameter in self._module.parameters()
            if parameter.requires_grad and not parameter.is_meta and parameter.grad is None
        ]

    def norm(self) -> Tensor:
        """Each tensor's own length first, in the order of the whole model: the same bits as in one process."""
        if self.grid.places == 1:
            return super().norm()
        trained = [each for each in self._module.parameters() if each.requires_grad]
        held = [each.grad for each in trained if each.grad is not None]
        norms = iter(torch._foreach_norm(held)) if held else iter(())
        nothing = torch.zeros((), device=self.grid.world.device)
        lengths = torch.stack([nothing if each.grad is None else next(norms) for each in trained])
        return torch.linalg.vector_norm(self.grid.down.all_reduce(lengths))

    def agree(self, flag: Tensor) -> None:
        self.grid.down.all_reduce_max(flag)

    def _entering(self, stage: int, micro: int) -> Sequence[TensorSpec]:
        return self.staged.specs(stage, self._sizes[micro])


class GradientSum:
    """Adds the gradients of each stage up over its replicas, in buckets, while others still compute. All send those
    of the same parameters: of each that any replica used in the first step, zeros where a step leaves it out."""

    def __init__(self, stages: Mapping[int, Sequence[nn.Parameter]], peers: World, module: nn.Module) -> None:
        """`module` has the parameters' names."""
        self._stages, self._peers, self._module = stages, peers, module
        self._used: dict[int, tuple[list[nn.Parameter], list[nn.Parameter]]] = {}
        """Of each stage, those that were used in the first step, and the others."""
        self._begun: list[tuple[list[Tensor], Pending]] = []

    def begin(self, stage: int) -> None:
        """When the stage's gradients are complete."""
        if self._peers.size == 1:
            return
        for bucket in _buckets([_gradient(each) for each in self._sent(stage)]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            self._begun.append((bucket, self._peers.all_reduce_async(flat)))

    def _sent(self, stage: int) -> list[nn.Parameter]:
        if stage not in self._used:
            parameters = self._stages[stage]
            pairs = list(zip(parameters, used_somewhere(parameters, self._peers), strict=True))
            self._used[stage] = (
                [each for each, used in pairs if used],
                [each for each, used in pairs if not used],
            )
        sent, idle = self._used[stage]
        for each in idle:
            if each.grad is not None:
                name = next(name for name, known in self._module.named_parameters() if known is each)
                raise UserError(
                    f"parameter {name} of stage {stage} got no gradient in the first step and has one now: its "
                    "replicas do not exchange it",
                    "use every trainable parameter in each step (multiply what is left out at times by 0)",
                )
        return sent

    def finish(self) -> None:
        """Afterwards `.grad` is the sum."""
        for bucket, pending in self._begun:
            parts = pending.wait().split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(
                bucket, [part.view(each.shape) for part, each in zip(parts, bucket, strict=True)]
            )
        self._begun.clear()


def without_pixels(batch: Batch) -> Batch:
    """For those who need the labels alone."""
    return batch._replace(images=batch.images[:, :0, :0])


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, up to a size."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size + gradient.nbytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
