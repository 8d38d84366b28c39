"""Runs one rank's instruction list on tensors.

Promises: instructions run in exactly the order of the list, which is also the one the simulator runs. Each stage's
backward gets the gradient that one process would have passed on there, in the same memory layout, so `.grad` is
bit-equal to accumulation over the same micro-batches. Nothing of a micro-batch is kept after its backward, and of a
sent tensor only what autograd needs. Rejects a stage whose outputs need gradients that its boundary does not
announce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from drumline.parallel.lanes import Instruction, Moment, Op, Recorder
from drumline.parallel.pipeline.mailbox import Mailbox
from drumline.parallel.pipeline.stage import StageModule, TensorSpec
from drumline.parallel.pipeline.transport import StageTransport

Boundaries = Callable[[int, int], Sequence[TensorSpec]]
"""The tensors that enter a stage, given the stage and the micro-batch."""
Around = Callable[[int, int], AbstractContextManager[Any]]
"""A context for the forward of a stage for a micro-batch (in the last stage, the loss too)."""


@dataclass(frozen=True)
class PeakUse:
    """The most that a lane has held at any one time since it was created."""

    micro_batches: int = 0
    """Micro-batches whose forward is done and whose backward is not, over all stages of the lane."""
    bytes: int = 0
    """Receive buffers for inputs and gradients, from their allocation to the end of the backward."""


class Lane:
    """One rank of a pipeline: its instructions, the stages it computes, and its transport."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        stages: Mapping[int, nn.Module],
        last: int,
        boundaries: Boundaries,
        transport: StageTransport,
        device: torch.device,
        parameters: Mapping[int, Sequence[nn.Parameter]] | None = None,
    ) -> None:
        """`parameters` are those that each stage uses. By default, all of its module or of its model."""
        self.instructions, self.stages, self.last = tuple(instructions), stages, last
        self._parameters = parameters or {
            number: tuple((stage.root if isinstance(stage, StageModule) else stage).parameters())
            for number, stage in stages.items()
        }
        self.boundaries, self.transport, self.device = boundaries, transport, device
        self.peak = PeakUse()
        self._held: dict[tuple[int, int], _Held] = {}
        self._trigger = torch.zeros((), device=device, requires_grad=True)
        self.around_backward: AbstractContextManager[Any] = nullcontext()
        """Entered for each backward: a lock, where lanes must not run theirs at the same time."""
        self._bytes = self._in_flight = 0
        self._complete: set[int] = set()
        """Stages in which every trainable parameter already has a gradient."""

    def run(
        self,
        feed: Callable[[int], Tensor],
        score: Callable[[int, Any], Tensor],
        around: Around = lambda stage, micro: nullcontext(),
        reduce: Callable[[int], None] = lambda stage: None,
        recorder: Recorder | None = None,
    ) -> None:
        """Runs one step. `feed` returns a micro-batch for stage 0, `score` the loss of the last stage's output, and
        `reduce` starts to sum a stage's gradients over the replicas. The caller's autocast applies to forwards
        only."""
        do = {
            Op.FORWARD: lambda stage, micro: self._forward(stage, micro, feed, score, around),
            Op.BACKWARD: self._backward,
            Op.SEND_GRADIENT: self._send_gradient,
            Op.REDUCE: lambda stage, micro: reduce(stage),
        }
        with torch.enable_grad():
            self._execute(do, recorder)

    def forward_only(
        self,
        feed: Callable[[int], Tensor],
        around: Around = lambda stage, micro: nullcontext(),
        recorder: Recorder | None = None,
    ) -> list[Any]:
        """Runs a list without backwards. Returns the last stage's output for each micro-batch: empty on other
        ranks."""
        outputs: list[Any] = []

        def forward(stage: int, micro: int) -> None:
            held = self._held.pop((stage, micro), None) or _Held()
            with around(stage, micro):
                output = self.stages[stage](*([feed(micro)] if stage == 0 else held.inputs))
            self._free(held)
            if stage == self.last:
                outputs.append(output)
            else:
                self._held[stage, micro] = _Held(outputs=tuple(output))

        def send(stage: int, micro: int) -> None:
            self._send_output(stage, micro)
            del self._held[stage, micro]

        with torch.no_grad():
            self._execute({Op.FORWARD: forward, Op.SEND_OUTPUT: send}, recorder)
        return outputs

    def _execute(self, do: Mapping[Op, Callable[[int, int], None]], recorder: Recorder | None) -> None:
        self._held.clear()
        self._complete.clear()
        self._bytes = self._in_flight = 0
        actions = {
            Op.RECEIVE_INPUT: self._receive_input,
            Op.WAIT_INPUT: self._wait_input,
            Op.SEND_OUTPUT: self._send_output,
            Op.RECEIVE_GRADIENT: self._receive_gradient,
            Op.WAIT_GRADIENT: self._wait_gradient,
            **do,
        }
        self.transport.recorder = recorder
        for item in self.instructions:
            start: Moment | None = None
            if recorder is not None and item.kind in _TAKES_TIME:
                start = recorder.now()
            actions[item.kind](item.stage, item.micro)
            if recorder is not None and start is not None:
                recorder.add(item.kind, item.stage, item.micro, start, recorder.now())
        self.transport.finish()
        assert not self._held, f"not finished in this step: {sorted(self._held)}"

    def _forward(
        self,
        stage: int,
        micro: int,
        feed: Callable[[int], Tensor],
        score: Callable[[int, Any], Tensor],
        around: Around,
    ) -> None:
        held = self._held.setdefault((stage, micro), _Held())
        with around(stage, micro):
            output = self.stages[stage](*([feed(micro)] if stage == 0 else self._enter(stage, micro, held)))
            if stage == self.last:
                output = score(micro, output)
        self._in_flight += 1
        self._update_peak()
        if stage == self.last:
            held.edges = _edges([output], [True])
            return
        held.outputs = tuple(output)
        specs = self.boundaries(stage + 1, micro)
        assert len(specs) == len(held.outputs), (
            f"stage {stage} returned {len(held.outputs)}, not {len(specs)}"
        )
        for number, (tensor, spec) in enumerate(zip(held.outputs, specs, strict=True)):
            # The reverse is harmless: a gradient that arrives for a tensor without one is dropped.
            assert spec.requires_grad or not tensor.requires_grad, (
                f"output {number} of stage {stage} lost its gradient"
            )
        held.edges = _edges(held.outputs, [spec.requires_grad for spec in specs])

    def _enter(self, stage: int, micro: int, held: _Held) -> list[Tensor]:
        """The received inputs, as tensors that autograd computed: their gradients go to the stage before."""
        specs, inputs = self.boundaries(stage, micro), held.inputs
        held.input_gradients = [None] * len(inputs)
        held.inputs = ()
        return [
            _Received.apply(self._trigger, held.input_gradients, index, data) if spec.requires_grad else data
            for index, (spec, data) in enumerate(zip(specs, inputs, strict=True))
        ]

    def _backward(self, stage: int, micro: int) -> None:
        held = self._held[stage, micro]
        pairs = list(zip(held.edges, held.gradients or (None,) * len(held.edges), strict=True))
        edges = [edge for edge, _ in pairs if edge is not None]
        gradients = [gradient for edge, gradient in pairs if edge is not None]
        held.edges, held.gradients = (), ()
        del pairs
        held.may_alias = stage > 0 and not self._has_gradients(stage)
        if edges:
            with self.around_backward, ExitStack() as stack:
                for kind in {"cpu", self.device.type}:
                    if torch.is_autocast_enabled(kind):
                        stack.enter_context(torch.autocast(kind, enabled=False))
                torch.autograd.backward(edges, gradients)
        self._in_flight -= 1
        self._free(held)
        if stage == 0:
            del self._held[stage, micro]

    def _has_gradients(self, stage: int) -> bool:
        """Whether all its trainable parameters have one. Checked until they do."""
        if stage not in self._complete and all(
            each.grad is not None for each in self._parameters[stage] if each.requires_grad
        ):
            self._complete.add(stage)
        return stage in self._complete

    def _receive_input(self, stage: int, micro: int) -> None:
        held = self._held.setdefault((stage, micro), _Held())
        specs = self.boundaries(stage, micro)
        held.pending_input = self.transport.receive(Op.SEND_OUTPUT, stage, micro, specs)
        self._allocate(held, specs)

    def _wait_input(self, stage: int, micro: int) -> None:
        held = self._held[stage, micro]
        held.inputs, held.pending_input = self.transport.wait(held.pending_input), None

    def _send_output(self, stage: int, micro: int) -> None:
        held = self._held[stage, micro]
        self.transport.send(Op.SEND_OUTPUT, stage, micro, [tensor.detach() for tensor in held.outputs])
        held.outputs = ()

    def _receive_gradient(self, stage: int, micro: int) -> None:
        held = self._held.setdefault((stage, micro), _Held())
        specs = [spec for spec in self.boundaries(stage + 1, micro) if spec.requires_grad]
        held.pending_gradient = self.transport.receive(Op.SEND_GRADIENT, stage, micro, specs)
        self._allocate(held, specs)

    def _wait_gradient(self, stage: int, micro: int) -> None:
        held = self._held[stage, micro]
        held.gradients = self.transport.wait(held.pending_gradient)
        held.pending_gradient = None

    def _send_gradient(self, stage: int, micro: int) -> None:
        held = self._held.pop((stage, micro))
        specs = self.boundaries(stage, micro)
        gradients = [
            torch.zeros(spec.shape, dtype=spec.dtype, device=self.device) if gradient is None else gradient
            for spec, gradient in zip(specs, held.input_gradients, strict=True)
            if spec.requires_grad
        ]
        if held.may_alias:
            # A parameter's first `.grad` may share the memory of an input's gradient, as in x + bias.view(1, 6). The
            # next micro-batch would add to it while it is being sent.
            gradients = [gradient.clone() for gradient in gradients]
        self.transport.send(Op.SEND_GRADIENT, stage, micro, gradients)

    def _allocate(self, held: _Held, specs: Iterable[TensorSpec]) -> None:
        size = sum(spec.bytes for spec in specs)
        held.bytes += size
        self._bytes += size
        self._update_peak()

    def _free(self, held: _Held) -> None:
        self._bytes -= held.bytes
        held.bytes = 0

    def _update_peak(self) -> None:
        most = self.peak
        if self._in_flight > most.micro_batches or self._bytes > most.bytes:
            self.peak = PeakUse(max(self._in_flight, most.micro_batches), max(self._bytes, most.bytes))


def run_lanes(
    mailbox: Mailbox,
    lanes: Sequence[Lane],
    feed: Callable[[int], Tensor],
    score: Callable[[int, Any], Tensor],
    around: Around = lambda stage, micro: nullcontext(),
    reduce: Callable[[int], None] = lambda stage: None,
    recorders: Sequence[Recorder] | None = None,
) -> None:
    """Runs one step of all lanes of a process, each in its own thread of the mailbox."""
    for recorder in recorders or ():
        recorder.start()
    each: Sequence[Recorder | None] = recorders or [None] * len(lanes)
    mailbox.run(
        [
            partial(lane.run, feed, score, around, reduce, recorder)
            for lane, recorder in zip(lanes, each, strict=True)
        ]
    )


_TAKES_TIME = (Op.FORWARD, Op.BACKWARD, Op.WAIT_INPUT, Op.WAIT_GRADIENT)


@dataclass
class _Held:
    """What a lane holds for one micro-batch in one stage."""

    pending_input: Any = None
    pending_gradient: Any = None
    inputs: Sequence[Tensor] = ()
    input_gradients: list[Tensor | None] = field(default_factory=list)
    """Filled in by the backward."""
    outputs: Sequence[Tensor] = ()
    edges: Sequence[GradientEdge | None] = ()
    """Where the backward starts, without holding the outputs themselves. None for one that needs no gradient."""
    gradients: Sequence[Tensor] = ()
    may_alias: bool = False
    """A parameter's first gradient may share the memory of an input's gradient."""
    bytes: int = 0


def _edges(outputs: Sequence[Tensor], wanted: Sequence[bool]) -> list[GradientEdge | None]:
    """One for each output that the next stage announces a gradient for."""
    return [
        get_gradient_edge(tensor) if tensor.requires_grad else None
        for tensor, want in zip(outputs, wanted, strict=True)
        if want
    ]


class _Received(torch.autograd.Function):
    """Makes a received tensor the result of a computation: neither a leaf nor a view, so a model may change it in
    place. It stays in the memory it was received in. Its gradient goes into `gradients`."""

    @staticmethod
    def forward(
        ctx: Any, trigger: Tensor, gradients: list[Tensor | None], index: int, data: Tensor
    ) -> Tensor:
        ctx.gradients, ctx.index = gradients, index
        return torch.empty(0, dtype=data.dtype, device=data.device).set_(
            data.untyped_storage(), data.storage_offset(), data.shape, data.stride()
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.gradients[ctx.index] = gradient
        return None, None, None, None
