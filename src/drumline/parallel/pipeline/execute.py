"""Runs one rank's instruction list on tensors.

Promises: exactly the list's order, the one the simulator runs. Each stage's backward gets the gradient that one
process would have passed on at that place, in the same memory layout, so `.grad` is bit-equal to accumulation over
the same micro-batches. Of a micro-batch nothing is kept after its backward, and of a sent tensor nothing but what
autograd needs. Refuses a stage whose outputs need gradients that its boundary does not announce.
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

from drumline.parallel.pipeline.boundary import Bound, TensorSpec
from drumline.parallel.pipeline.carriers import Carrier
from drumline.parallel.pipeline.instructions import Instruction, Kind
from drumline.parallel.pipeline.mailbox import Mailbox
from drumline.parallel.pipeline.record import Mark, Recorder

Boundaries = Callable[[int, int], Sequence[TensorSpec]]
"""What enters a stage, of a micro-batch."""
Switch = Callable[[int, int], AbstractContextManager[Any]]
"""Entered around the forward of a stage for a micro-batch (the last stage's score included)."""


@dataclass(frozen=True)
class HighWater:
    """The most that a lane has held at a time, since it was made."""

    micro_batches: int = 0
    """Whose forward was done and whose backward was not, over all stages of the lane."""
    bytes: int = 0
    """Of buffers for inputs and gradients of other lanes, from making room for them to the end of their backward."""


class Lane:
    """One rank of a pipeline: its list, the stages it computes, and what carries its tensors."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        stages: Mapping[int, nn.Module],
        last: int,
        boundaries: Boundaries,
        carrier: Carrier,
        device: torch.device,
        parameters: Mapping[int, Sequence[nn.Parameter]] | None = None,
    ) -> None:
        """`parameters` are those that each stage computes with; unless told, all of its module or its model."""
        self.instructions, self.stages, self.last = tuple(instructions), stages, last
        self._parameters = parameters or {
            number: tuple((stage.root if isinstance(stage, Bound) else stage).parameters())
            for number, stage in stages.items()
        }
        self.boundaries, self.carrier, self.device = boundaries, carrier, device
        self.high_water = HighWater()
        self._held: dict[tuple[int, int], _Held] = {}
        self._trigger = torch.zeros((), device=device, requires_grad=True)
        self.around_backward: AbstractContextManager[Any] = nullcontext()
        """Entered for each backward, again and again: a lock, where lanes must not do so at the same time."""
        self._bytes = self._in_flight = 0
        self._complete: set[int] = set()
        """Stages of which every parameter that is trained has a gradient, so that no other will be its first."""

    def run(
        self,
        feed: Callable[[int], Tensor],
        score: Callable[[int, Any], Tensor],
        switch: Switch = lambda stage, micro: nullcontext(),
        reduce: Callable[[int], None] = lambda stage: None,
        recorder: Recorder | None = None,
    ) -> None:
        """One step. `feed` gives stage 0 its micro-batch, `score` makes the loss of what the last stage gives,
        `reduce` begins to exchange a stage's gradients. The caller's autocast holds for forwards only."""
        do = {
            Kind.FORWARD: lambda stage, micro: self._forward(stage, micro, feed, score, switch),
            Kind.BACKWARD: self._backward,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.REDUCE: lambda stage, micro: reduce(stage),
        }
        with torch.enable_grad():
            self._follow(do, recorder)

    def forward_only(
        self,
        feed: Callable[[int], Tensor],
        switch: Switch = lambda stage, micro: nullcontext(),
        recorder: Recorder | None = None,
    ) -> list[Any]:
        """One pass of a list without backwards: what the last stage gave for each micro-batch; empty elsewhere."""
        outputs: list[Any] = []

        def forward(stage: int, micro: int) -> None:
            held = self._held.pop((stage, micro), None) or _Held()
            with switch(stage, micro):
                output = self.stages[stage](*([feed(micro)] if stage == 0 else held.inputs))
            self._let_go(held)
            if stage == self.last:
                outputs.append(output)
            else:
                self._held[stage, micro] = _Held(outputs=tuple(output))

        def send(stage: int, micro: int) -> None:
            self._send_output(stage, micro)
            del self._held[stage, micro]

        with torch.no_grad():
            self._follow({Kind.FORWARD: forward, Kind.SEND_OUTPUT: send}, recorder)
        return outputs

    def _follow(self, do: Mapping[Kind, Callable[[int, int], None]], recorder: Recorder | None) -> None:
        self._held.clear()
        self._complete.clear()
        self._bytes = self._in_flight = 0
        actions = {
            Kind.RECEIVE_INPUT: self._receive_input,
            Kind.WAIT_INPUT: self._wait_input,
            Kind.SEND_OUTPUT: self._send_output,
            Kind.RECEIVE_GRADIENT: self._receive_gradient,
            Kind.WAIT_GRADIENT: self._wait_gradient,
            **do,
        }
        self.carrier.recorder = recorder
        for item in self.instructions:
            start: Mark | None = None
            if recorder is not None and item.kind in _TAKES_TIME:
                start = recorder.now()
            actions[item.kind](item.stage, item.micro)
            if recorder is not None and start is not None:
                recorder.note(item.kind, item.stage, item.micro, start, recorder.now())
        self.carrier.finish()
        assert not self._held, f"left over after the step: {sorted(self._held)}"

    def _forward(
        self,
        stage: int,
        micro: int,
        feed: Callable[[int], Tensor],
        score: Callable[[int, Any], Tensor],
        switch: Switch,
    ) -> None:
        held = self._held.setdefault((stage, micro), _Held())
        with switch(stage, micro):
            output = self.stages[stage](*([feed(micro)] if stage == 0 else self._enter(stage, micro, held)))
            if stage == self.last:
                output = score(micro, output)
        self._in_flight += 1
        self._mark_high_water()
        if stage == self.last:
            held.edges = _edges([output], [True])
            return
        held.outputs = tuple(output)
        specs = self.boundaries(stage + 1, micro)
        assert len(specs) == len(held.outputs), f"stage {stage} gives {len(held.outputs)}, not {len(specs)}"
        for number, (tensor, spec) in enumerate(zip(held.outputs, specs, strict=True)):
            # The other way round is harmless: the gradient of a tensor that needs none comes and is dropped.
            assert spec.requires_grad or not tensor.requires_grad, (
                f"output {number} of stage {stage} lost its gradient"
            )
        held.edges = _edges(held.outputs, [spec.requires_grad for spec in specs])

    def _enter(self, stage: int, micro: int, held: _Held) -> list[Tensor]:
        """The received inputs, as results of a computing whose gradient goes to the stage before."""
        specs, inputs = self.boundaries(stage, micro), held.inputs
        held.arrived = [None] * len(inputs)
        held.inputs = ()
        return [
            _Arrive.apply(self._trigger, held.arrived, place, data) if spec.requires_grad else data
            for place, (spec, data) in enumerate(zip(specs, inputs, strict=True))
        ]

    def _backward(self, stage: int, micro: int) -> None:
        held = self._held[stage, micro]
        pairs = list(zip(held.edges, held.gradients or (None,) * len(held.edges), strict=True))
        edges = [edge for edge, _ in pairs if edge is not None]
        gradients = [gradient for edge, gradient in pairs if edge is not None]
        held.edges, held.gradients = (), ()
        del pairs
        held.may_share = stage > 0 and not self._has_gradients(stage)
        if edges:
            with self.around_backward, ExitStack() as stack:
                for kind in {"cpu", self.device.type}:
                    if torch.is_autocast_enabled(kind):
                        stack.enter_context(torch.autocast(kind, enabled=False))
                torch.autograd.backward(edges, gradients)
        self._in_flight -= 1
        self._let_go(held)
        if stage == 0:
            del self._held[stage, micro]

    def _has_gradients(self, stage: int) -> bool:
        """Whether all its parameters do; looked at until they have."""
        if stage not in self._complete and all(
            each.grad is not None for each in self._parameters[stage] if each.requires_grad
        ):
            self._complete.add(stage)
        return stage in self._complete

    def _receive_input(self, stage: int, micro: int) -> None:
        held = self._held.setdefault((stage, micro), _Held())
        specs = self.boundaries(stage, micro)
        held.input_to_come = self.carrier.receive_input(stage, micro, specs)
        self._make_room(held, specs)

    def _wait_input(self, stage: int, micro: int) -> None:
        held = self._held[stage, micro]
        held.inputs, held.input_to_come = self.carrier.wait(held.input_to_come), None

    def _send_output(self, stage: int, micro: int) -> None:
        held = self._held[stage, micro]
        self.carrier.send_output(stage, micro, [tensor.detach() for tensor in held.outputs])
        held.outputs = ()

    def _receive_gradient(self, stage: int, micro: int) -> None:
        held = self._held.setdefault((stage, micro), _Held())
        specs = [spec for spec in self.boundaries(stage + 1, micro) if spec.requires_grad]
        held.gradient_to_come = self.carrier.receive_gradient(stage, micro, specs)
        self._make_room(held, specs)

    def _wait_gradient(self, stage: int, micro: int) -> None:
        held = self._held[stage, micro]
        held.gradients = self.carrier.wait(held.gradient_to_come)
        held.gradient_to_come = None

    def _send_gradient(self, stage: int, micro: int) -> None:
        held = self._held.pop((stage, micro))
        specs = self.boundaries(stage, micro)
        gradients = [
            torch.zeros(spec.shape, dtype=spec.dtype, device=self.device) if gradient is None else gradient
            for spec, gradient in zip(specs, held.arrived, strict=True)
            if spec.requires_grad
        ]
        if held.may_share:
            # Autograd may give a parameter its first `.grad` in the memory of an input's gradient, as in
            # x + bias.view(1, 6), and the next micro-batch would add to it while it is being sent.
            gradients = [gradient.clone() for gradient in gradients]
        self.carrier.send_gradient(stage, micro, gradients)

    def _make_room(self, held: _Held, specs: Iterable[TensorSpec]) -> None:
        size = sum(spec.bytes for spec in specs)
        held.bytes += size
        self._bytes += size
        self._mark_high_water()

    def _let_go(self, held: _Held) -> None:
        self._bytes -= held.bytes
        held.bytes = 0

    def _mark_high_water(self) -> None:
        most = self.high_water
        if self._in_flight > most.micro_batches or self._bytes > most.bytes:
            self.high_water = HighWater(
                max(self._in_flight, most.micro_batches), max(self._bytes, most.bytes)
            )


def run_lanes(
    mailbox: Mailbox,
    lanes: Sequence[Lane],
    feed: Callable[[int], Tensor],
    score: Callable[[int, Any], Tensor],
    switch: Switch = lambda stage, micro: nullcontext(),
    reduce: Callable[[int], None] = lambda stage: None,
    recorders: Sequence[Recorder] | None = None,
) -> None:
    """One step of all lanes of a process, each at its place of the mailbox and on that place's thread."""
    for recorder in recorders or ():
        recorder.start()
    each: Sequence[Recorder | None] = recorders or [None] * len(lanes)
    mailbox.run(
        [
            partial(lane.run, feed, score, switch, reduce, recorder)
            for lane, recorder in zip(lanes, each, strict=True)
        ]
    )


_TAKES_TIME = (Kind.FORWARD, Kind.BACKWARD, Kind.WAIT_INPUT, Kind.WAIT_GRADIENT)


@dataclass
class _Held:
    """What a lane holds of one micro-batch in one stage."""

    input_to_come: Any = None
    gradient_to_come: Any = None
    inputs: Sequence[Tensor] = ()
    arrived: list[Tensor | None] = field(default_factory=list)
    """The gradients of the inputs, as the backward finds them."""
    outputs: Sequence[Tensor] = ()
    edges: Sequence[GradientEdge | None] = ()
    """Where the backward begins, without holding the outputs themselves; None for one that needs no gradient."""
    gradients: Sequence[Tensor] = ()
    may_share: bool = False
    """A parameter's first gradient may lie in the memory of those that arrived."""
    bytes: int = 0


def _edges(outputs: Sequence[Tensor], wanted: Sequence[bool]) -> list[GradientEdge | None]:
    """One for each output that a gradient is announced for."""
    return [
        get_gradient_edge(tensor) if tensor.requires_grad else None
        for tensor, want in zip(outputs, wanted, strict=True)
        if want
    ]


class _Arrive(torch.autograd.Function):
    """A received tensor as the result of a computing: no leaf and no view, so that a model may change it in place; in
    the memory it was received in. Its gradient is put into a box."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, box: list[Tensor | None], place: int, data: Tensor) -> Tensor:
        ctx.box, ctx.place = box, place
        return torch.empty(0, dtype=data.dtype, device=data.device).set_(
            data.untyped_storage(), data.storage_offset(), data.shape, data.stride()
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.box[ctx.place] = gradient
        return None, None, None, None
