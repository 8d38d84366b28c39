"""How tensors travel between the stages of a pipeline: the interface, and its implementation between processes.

Promises: a tensor arrives with the values and the strides it was sent with, so the kernels that read it make the same
choices as in one process. It arrives in a buffer of its own, so a stage may change it in place. Sending never waits
for the receiver; only `wait` and `finish` do. A sent tensor is kept until it has been sent, no longer.
`mailbox.py` implements the interface between the threads and devices of one process.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from drumline.parallel.lanes import Op, Recorder
from drumline.parallel.pipeline.stage import TensorSpec
from drumline.parallel.world import Pending, World

DIRECTIONS = {Op.SEND_OUTPUT: 1, Op.SEND_GRADIENT: -1}
"""The receiver's stage minus the sender's, for each direction. Sender and receiver both name a direction by the
sender's instruction."""


class StageTransport(Protocol):
    """Connects one rank to the stages before and after its own. `stage` is always the one that computes here."""

    recorder: Recorder | None
    """Records how long each send took, if set."""

    def send(self, direction: Op, stage: int, micro: int, tensors: Sequence[Tensor]) -> None:
        """Starts to send outputs to stage + 1, or gradients to stage - 1."""

    def receive(self, direction: Op, stage: int, micro: int, specs: Sequence[TensorSpec]) -> Any:
        """Allocates buffers for outputs of stage - 1, or for gradients from stage + 1, and starts to receive them.
        Returns a handle for `wait`."""

    def wait(self, handle: Any) -> Sequence[Tensor]:
        """The received tensors. On a GPU the compute stream waits for them, not the host."""

    def finish(self) -> None:
        """At the end of a step: returns once everything is sent."""


class ProcessTransport:
    """Connects one rank to those of other processes, through point-to-point messages.

    `down` carries outputs and `up` gradients, so neither direction waits for the other. Every tensor of a step has a
    tag of its own. The sender announces the strides once for each shape. What a rank sends to itself (when it
    computes several stages) is copied.
    """

    def __init__(self, down: World, up: World) -> None:
        self.recorder: Recorder | None = None
        self._worlds = {Op.SEND_OUTPUT: down, Op.SEND_GRADIENT: up}
        self._device = down.device
        self._announced: dict[_Form, list[tuple[int, ...]]] = {}
        """The strides that this rank has announced to receivers."""
        self._requested: set[_Form] = set()
        self._strides: dict[_Form, list[tuple[int, ...]]] = {}
        """The strides that senders have announced to this rank."""
        self._own: dict[tuple[Op, int, int], list[Tensor]] = {}
        self._sent: list[Pending] = []
        # gloo reports a finished send only to a caller that waits for it, so a thread does the waiting.
        self._threads = {kind: WorkerThread(f"{kind}") for kind in DIRECTIONS if down.backend != "nccl"}
        self._error: BaseException | None = None

    def wait(self, handle: Any) -> Sequence[Tensor]:
        own, form, header, buffers = handle
        if own is not None:
            return self._own.pop(own, [])
        if header is not None:
            numbers = iter(header.wait().tolist())
            self._strides[form] = [tuple(next(numbers) for _ in shape) for shape in form[2]]
        strides = self._strides[form] if buffers else []
        return [
            buffer.wait().as_strided(shape, stride)
            for buffer, shape, stride in zip(buffers, form[2], strides, strict=True)
        ]

    def finish(self) -> None:
        for thread in self._threads.values():
            thread.drain()
        for pending in self._sent:
            pending.wait()
        self._sent.clear()
        if self._error is not None:
            raise self._error

    def send(self, direction: Op, stage: int, micro: int, tensors: Sequence[Tensor]) -> None:
        world, receiver = self._worlds[direction], stage + DIRECTIONS[direction]
        to = receiver % world.size
        if to == world.rank:
            self._own[direction, receiver, micro] = [dense(tensor).clone() for tensor in tensors]
            return
        start = time.perf_counter()
        form: _Form = (direction, receiver, tuple(tuple(tensor.shape) for tensor in tensors))
        pending = []
        if form not in self._announced and tensors:
            self._announced[form] = [dense(tensor).stride() for tensor in tensors]
            numbers = [number for stride in self._announced[form] for number in stride]
            pending.append(world.isend(self._header(numbers), to, _tag(direction, receiver, micro, 0)))
        for index, tensor in enumerate(tensors):
            run = flat(_with_strides(tensor, self._announced[form][index]))
            pending.append(world.isend(run, to, _tag(direction, receiver, micro, 1 + index)))
        if self._threads:
            recorder = self.recorder

            def wait_until_sent() -> None:
                try:
                    for each in pending:
                        each.wait()
                except BaseException as error:
                    self._error = self._error or error
                if recorder is not None and pending:
                    recorder.add(direction, stage, micro, start, time.perf_counter())

            self._threads[direction].submit(wait_until_sent)
        else:
            # Frees the memory of finished sends during the step: a step has many micro-batches.
            self._sent = [each for each in self._sent if not each.is_completed()] + pending

    def receive(self, direction: Op, stage: int, micro: int, specs: Sequence[TensorSpec]) -> Any:
        world = self._worlds[direction]
        source = (stage - DIRECTIONS[direction]) % world.size
        if source == world.rank:
            return (direction, stage, micro), None, None, []
        form: _Form = (direction, stage, tuple(tuple(spec.shape) for spec in specs))
        header = None
        if form not in self._requested and specs:
            self._requested.add(form)
            numbers = self._header([0] * sum(len(shape) for shape in form[2]))
            header = world.irecv(numbers, source, _tag(direction, stage, micro, 0))
        buffers = []
        for index, spec in enumerate(specs):
            buffer = torch.empty(torch.Size(spec.shape).numel(), dtype=spec.dtype, device=self._device)
            buffers.append(world.irecv(buffer, source, _tag(direction, stage, micro, 1 + index)))
        return None, form, header, buffers

    def _header(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device="cpu" if self._threads else self._device)


class WorkerThread:
    """A thread that runs one job after the other and ends with its owner. A job must handle its own errors."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_run_jobs, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def drain(self) -> None:
        """Waits until every submitted job has run."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself if it fills its memory without gaps or overlaps, in any order of dimensions. Otherwise a copy
    that does, in the order of its strides."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return tensor.clone()
            expected *= size
    return tensor


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's memory, as a vector."""
    return tensor.as_strided((tensor.numel(),), (1,))


_Form = tuple[Op, int, tuple[tuple[int, ...], ...]]
"""Direction, receiving stage, and shapes. Strides are announced once for each."""


def _run_jobs(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # a job may hold tensors, and the next one may be a long time coming


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with these strides, which are dense."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _tag(direction: Op, stage: int, micro: int, index: int) -> int:
    """A number below 2^31 that identifies one tensor of a step."""
    assert max(stage >> 11, micro >> 13, index >> 6) == 0, (stage, micro, index)
    return (((stage << 13) | micro) << 6 | index) << 1 | (direction == Op.SEND_GRADIENT)
