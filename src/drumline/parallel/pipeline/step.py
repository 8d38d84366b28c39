"""A step of a model in stages: its gradients, their sum over replicas, and forward passes for evaluation.

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
from drumline.core.precision import Precision, autocast
from drumline.data.feed.batch import Batch
from drumline.parallel.data_parallel import BufferMean, used_anywhere
from drumline.parallel.lanes import Recorder
from drumline.parallel.model_draws import ModelDraws
from drumline.parallel.norm import commit_statistics, forget_statistics
from drumline.parallel.pipeline.lane import Lane, run_lanes
from drumline.parallel.pipeline.mailbox import LaneDevice, Mailbox
from drumline.parallel.pipeline.schedule import Shape, forward_lists, instruction_lists
from drumline.parallel.pipeline.stage import Segment, StageModule, TensorSpec, boundaries
from drumline.parallel.pipeline.transport import ProcessTransport, StageTransport
from drumline.parallel.strategy import ForwardPass, Prefetch, split_batch
from drumline.parallel.world import Grid, Pending, World

BUCKET_BYTES = 25 * 2**20
"""Size of one message to the other replicas."""


class Tail(nn.Module):
    """Stands in for the whole model where the loss is computed: an objective that calls it gets the last stage's
    output, with whatever the task does after that."""

    def __init__(self, after: Callable[..., Any]) -> None:
        super().__init__()
        self.after = after
        self.output: Any = None

    def forward(self, images: Tensor, *others: Any) -> Any:
        output, self.output = self.output, None
        assert output is not None, "the last stage has not been computed"
        return self.after(output, *others)


@dataclass(frozen=True)
class OwnStages:
    """The stages of a model that this process computes."""

    module: nn.Module
    """Everything that is trained. Tensors of stages that other processes compute are on the meta device."""
    stages: Mapping[int, StageModule]
    parameters: Mapping[int, Sequence[nn.Parameter]]
    """Of each of these stages. What is trained outside the model belongs to the last."""
    tail: Tail
    specs: Callable[[int, int], Sequence[TensorSpec]]
    """The inputs of a stage, given the number of samples."""
    devices: Sequence[torch.device]
    """Of the lanes of this process."""
    precision: Precision
    reads_images: bool
    """Whether the objective reads the images too, as a teacher does."""
    recomputes: bool = False
    """Whether backward computes blocks again, which then draw the same random numbers again."""
    prefetch: Prefetch | None = None
    """Called with a step's micro-batches before the stages compute them."""


class PipelineStep:
    """Computes the gradients of a step in this process's lanes: one, or all of a pipeline in one process."""

    def __init__(self, own: OwnStages, shape: Shape, grid: Grid) -> None:
        self.own, self.shape, self.grid = own, shape, grid
        self.lists = instruction_lists(
            shape.schedule, shape.lanes, shape.chunks, shape.micro_batches, reduces=shape.replicas > 1
        )
        self._held = sorted(own.stages)  # numbers of the stages
        first = grid.replica * shape.micro_batches * shape.stages
        self.streams: Sequence[int] = [
            first + micro * shape.stages + stage
            for micro in range(shape.micro_batches)
            for stage in self._held
        ]
        self._box = (
            None if shape.over_processes else Mailbox([LaneDevice.on(device) for device in own.devices])
        )
        transports: Sequence[StageTransport] = (
            self._box.transports if self._box else (ProcessTransport(grid.down, grid.up),)
        )
        numbers = range(shape.lanes) if self._box else (grid.place,)
        self._sizes: list[int] = []
        self.lanes = [
            Lane(
                self.lists[number],
                {stage: each for stage, each in own.stages.items() if stage % shape.lanes == number},
                shape.stages - 1,
                self._entering,
                transport,
                device,
                own.parameters,
            )
            for number, transport, device in zip(numbers, transports, own.devices, strict=True)
        ]
        self.recorders = [
            Recorder(number, device) for number, device in zip(numbers, own.devices, strict=True)
        ]
        self.computing: dict[int, tuple[int, Batch]] = {}
        """Thread to the stage and micro-batch it computes at the moment."""
        self._sum = GradientSum(own.parameters, grid.peers, own.module)
        self.buffers = BufferMean(own.module, grid.peers)
        # All lanes of a process use one generator: a stage that draws locks it.
        self._drawing = threading.Lock()

    def gradients(self, batch: Batch, forward: ForwardPass, draws: ModelDraws) -> None:
        """Sends the micro-batches through the stages, several at a time."""
        pieces = split_batch(batch, self.shape.micro_batches)
        self._sizes = [len(piece.labels) for piece in pieces]
        # Shapes are found here, once, because that swaps tensors of the model while lanes do not compute.
        for size in set(self._sizes):
            self.own.specs(0, size)
        entry, tail = self.lanes[0].device, self.own.tail

        def feed(micro: int) -> Tensor:
            return forward.images(pieces[micro]).to(entry, non_blocking=True)

        def score(micro: int, output: Any) -> Tensor:
            tail.output = output
            return forward.loss(pieces[micro] if self.own.reads_images else without_pixels(pieces[micro]))

        @contextmanager
        def around(stage: int, micro: int) -> Iterator[None]:
            with self._drawing if draws.active and self._box else nullcontext():
                self.computing[threading.get_ident()] = stage, pieces[micro]
                device = self.lanes[stage % len(self.lanes)].device
                draws.switch(micro * len(self._held) + self._held.index(stage), device)
                with autocast(device, self.own.precision):
                    yield

        if self.own.prefetch is not None:
            self.own.prefetch(pieces, forward.images)
        if self._box and self.own.recomputes and draws.active:
            for lane in self.lanes:
                lane.around_backward = self._drawing
        forget_statistics(self.own.module)
        recorders = self.recorders if self.recorders[0].recording else None
        if self._box is not None:
            run_lanes(self._box, self.lanes, feed, score, around, self._sum.begin, recorders)
        else:
            if recorders:
                recorders[0].start()
            self.lanes[0].run(feed, score, around, self._sum.begin, recorders[0] if recorders else None)
        self._sum.finish()
        self.computing.clear()
        commit_statistics(self.own.module)

    def _entering(self, stage: int, micro: int) -> Sequence[TensorSpec]:
        return self.own.specs(stage, self._sizes[micro])


class GradientSum:
    """Sums the gradients of each stage over its replicas, in buckets, while other stages still compute. All replicas
    send the same parameters: those that any of them used in the first step, with zeros where a step leaves one
    out."""

    def __init__(self, stages: Mapping[int, Sequence[nn.Parameter]], peers: World, module: nn.Module) -> None:
        """`module` has the parameters' names."""
        self._stages, self._peers, self._module = stages, peers, module
        self._used: dict[int, tuple[list[nn.Parameter], list[nn.Parameter]]] = {}
        """By stage, the parameters used in the first step, and the others."""
        self._begun: list[tuple[list[Tensor], Pending]] = []

    def begin(self, stage: int) -> None:
        """Called when the stage's gradients are complete."""
        if self._peers.size == 1:
            return
        for bucket in _buckets([_gradient(each) for each in self._sent(stage)]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            self._begun.append((bucket, self._peers.all_reduce_async(flat)))

    def _sent(self, stage: int) -> list[nn.Parameter]:
        if stage not in self._used:
            parameters = self._stages[stage]
            pairs = list(zip(parameters, used_anywhere(parameters, self._peers), strict=True))
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
                    "use every trainable parameter in each step (multiply an unused one by 0)",
                )
        return sent

    def finish(self) -> None:
        """Afterwards `.grad` is the sum."""
        for bucket, pending in self._begun:
            sums = pending.wait().split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(
                bucket, [total.view(each.shape) for total, each in zip(sums, bucket, strict=True)]
            )
        self._begun.clear()


def without_pixels(batch: Batch) -> Batch:
    """The batch with empty images, for objectives that read the labels alone."""
    return batch._replace(images=batch.images[:, :0, :0])


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive gradients of one dtype, up to a size."""
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


class StagedForward(nn.Module):
    """Calls the stages of a model. Setting its mode sets the mode of the model."""

    def __init__(
        self,
        model: nn.Module,
        segments: Sequence[Segment],
        shape: Shape,
        grid: Grid,
        devices: Sequence[torch.device],
        precision: Precision,
    ) -> None:
        super().__init__()
        self._held = (model,)
        self.training = model.training
        self._stages = [segment.bind(model) for segment in segments]
        self._shape, self._grid, self._devices, self._precision = shape, grid, devices, precision
        self._specs: dict[tuple[int, ...], list[tuple[TensorSpec, ...]]] = {}
        self._wire = ProcessTransport(grid.down, grid.up) if shape.over_processes else None

    def train(self, mode: bool = True) -> StagedForward:
        """Sets the mode of the model, too."""
        self.training = mode
        self._held[0].train(mode)
        return self

    def forward(self, images: Tensor) -> Tensor | None:
        """One batch."""
        found = self.several([tuple(images.shape)], lambda number: images)
        return found[0] if found else None

    def several(self, shapes: Sequence[tuple[int, ...]], feed: Callable[[int], Tensor]) -> list[Any]:
        """Several batches of these shapes, pipelined: the last stage's output for each; an empty list on a process
        without it. `feed` is called on the process with the first stage."""
        if self._wire is None:
            return [self._here(feed(number)) for number in range(len(shapes))]
        return self._over_processes(shapes, feed, self._wire)

    def _here(self, images: Tensor) -> Tensor:
        """All stages in this process, one after the other."""
        values: tuple[Tensor, ...] = (images,)
        for number, stage in enumerate(self._stages):
            device = self._devices[number % len(self._devices)]
            values = stage(*(value.to(device) for value in values))
        logits: Tensor = values  # type: ignore[assignment]
        return logits

    def _over_processes(
        self, shapes: Sequence[tuple[int, ...]], feed: Callable[[int], Tensor], wire: ProcessTransport
    ) -> list[Any]:
        shape, place = self._shape, self._grid.place
        specs = [self._entering(size) for size in shapes]
        lane = Lane(
            forward_lists(shape.lanes, shape.chunks, len(shapes))[place],
            {number: stage for number, stage in enumerate(self._stages) if number % shape.lanes == place},
            shape.stages - 1,
            lambda stage, micro: specs[micro][stage],
            wire,
            self._devices[0],
        )
        return lane.forward_only(feed)

    def _entering(self, key: tuple[int, ...]) -> list[tuple[TensorSpec, ...]]:
        if key not in self._specs:
            # Fake tensors need version counters, which inference mode does not keep.
            with torch.inference_mode(False), torch.no_grad():
                sample = torch.empty(key, device=self._devices[0])
                self._specs[key] = boundaries(self._stages, sample, self._precision)
        return self._specs[key]
