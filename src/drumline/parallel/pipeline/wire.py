"""Carries tensors between processes, by the world's point-to-point messages.

Promises: every tensor of a step has a tag of its own, and tensors of one channel are received in the order they are
sent; layouts are told once for each shape, so no message says how long the next one is. What a rank sends to itself
(several stages, one rank) is copied. A failing peer is the world's to report.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drumline.parallel.pipeline.boundary import TensorSpec
from drumline.parallel.pipeline.carriers import DIRECTIONS, Hand, Ways, dense, flat
from drumline.parallel.pipeline.instructions import Kind
from drumline.parallel.world import Pending, World


class Wire(Ways):
    """One rank among processes. `down` carries outputs, `up` gradients: two worlds (with links, where a transport
    keeps an order), so that neither way waits for the other. The layout of what is sent is told once for each
    shape."""

    def __init__(self, down: World, up: World) -> None:
        self._worlds = {Kind.SEND_OUTPUT: down, Kind.SEND_GRADIENT: up}
        self._device = down.device
        self._told: dict[_Form, list[tuple[int, ...]]] = {}
        self._asked: set[_Form] = set()
        self._heard: dict[_Form, list[tuple[int, ...]]] = {}
        self._own: dict[tuple[Kind, int, int], list[Tensor]] = {}
        self._sent: list[Pending] = []
        # gloo tells of a finished send only whoever waits for it, and holds the host: so a thread does.
        self._hands = {kind: Hand(f"{kind}") for kind in DIRECTIONS if down.backend != "nccl"}
        self._error: BaseException | None = None

    def wait(self, coming: Any) -> Sequence[Tensor]:
        own, form, header, rooms = coming
        if own is not None:
            return self._own.pop(own, [])
        if header is not None:
            numbers = iter(header.wait().tolist())
            self._heard[form] = [tuple(next(numbers) for _ in shape) for shape in form[2]]
        strides = self._heard[form] if rooms else []
        return [
            room.wait().as_strided(shape, stride)
            for room, shape, stride in zip(rooms, form[2], strides, strict=True)
        ]

    def finish(self) -> None:
        for hand in self._hands.values():
            hand.settle()
        for pending in self._sent:
            pending.wait()
        self._sent.clear()
        if self._error is not None:
            raise self._error

    def _send(self, kind: Kind, stage: int, micro: int, tensors: Sequence[Tensor]) -> None:
        world, receiver = self._worlds[kind], stage + DIRECTIONS[kind]
        to = receiver % world.size
        if to == world.rank:
            self._own[kind, receiver, micro] = [dense(tensor).clone() for tensor in tensors]
            return
        start = time.perf_counter()
        form: _Form = (kind, receiver, tuple(tuple(tensor.shape) for tensor in tensors))
        pending = []
        if form not in self._told and tensors:
            self._told[form] = [dense(tensor).stride() for tensor in tensors]
            numbers = [number for stride in self._told[form] for number in stride]
            pending.append(world.isend(self._header(numbers), to, _tag(kind, receiver, micro, 0)))
        for index, tensor in enumerate(tensors):
            run = flat(_laid_out(tensor, self._told[form][index]))
            pending.append(world.isend(run, to, _tag(kind, receiver, micro, 1 + index)))
        if self._hands:
            recorder = self.recorder

            def see_off() -> None:
                try:
                    for each in pending:
                        each.wait()
                except BaseException as error:
                    self._error = self._error or error
                if recorder is not None and pending:
                    recorder.note(kind, stage, micro, start, time.perf_counter())

            self._hands[kind].do(see_off)
        else:
            # What has been sent gives its memory back now: a step has many micro-batches.
            self._sent = [each for each in self._sent if not each.is_completed()] + pending

    def _receive(self, kind: Kind, stage: int, micro: int, specs: Sequence[TensorSpec]) -> Any:
        world = self._worlds[kind]
        source = (stage - DIRECTIONS[kind]) % world.size
        if source == world.rank:
            return (kind, stage, micro), None, None, []
        form: _Form = (kind, stage, tuple(tuple(spec.shape) for spec in specs))
        header = None
        if form not in self._asked and specs:
            self._asked.add(form)
            numbers = self._header([0] * sum(len(shape) for shape in form[2]))
            header = world.irecv(numbers, source, _tag(kind, stage, micro, 0))
        rooms = []
        for index, spec in enumerate(specs):
            room = torch.empty(torch.Size(spec.shape).numel(), dtype=spec.dtype, device=self._device)
            rooms.append(world.irecv(room, source, _tag(kind, stage, micro, 1 + index)))
        return None, form, header, rooms

    def _header(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device="cpu" if self._hands else self._device)


_Form = tuple[Kind, int, tuple[tuple[int, ...], ...]]
"""Direction, receiving stage, and the shapes: what a layout is told for."""


def _laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """With these strides, which are dense."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _tag(kind: Kind, stage: int, micro: int, index: int) -> int:
    """A number of its own for each tensor of a step, below 2^31."""
    assert max(stage >> 11, micro >> 13, index >> 6) == 0, (stage, micro, index)
    return (((stage << 13) | micro) << 6 | index) << 1 | (kind == Kind.SEND_GRADIENT)
