"""Carries tensors between the threads and devices of one process: the `StageTransport` of lanes that share a process.

Promises: each lane has a thread of its own, kept between steps. On a GPU, copies run on streams of their own, behind
the events they need, and the host waits only until the sender has issued its copy. Memory is freed in stream order.
Several lanes on one device are virtual devices: copies between them are real. The first lane that fails ends the
others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from drumline.parallel.lanes import Op, Recorder
from drumline.parallel.pipeline.stage import TensorSpec
from drumline.parallel.pipeline.transport import DIRECTIONS, StageTransport, WorkerThread, dense, flat

T = TypeVar("T")
Move = Callable[[Tensor, Tensor], None]
"""Copies the second tensor into the first, on a GPU on the current stream."""


def copy_direct(into: Tensor, tensor: Tensor) -> None:
    """Copies from memory to memory."""
    into.copy_(tensor, non_blocking=True)


def copy_through_host(into: Tensor, tensor: Tensor) -> None:
    """Copies through pinned host memory: on one GPU, as slow as a real link."""
    assert into.device == tensor.device, "two GPUs would each copy on a stream of their own"
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    into.copy_(host, non_blocking=True)


@dataclass(frozen=True)
class LaneDevice:
    """The device of one lane, which virtual devices share. On a GPU, with streams of its own: one to compute, and for
    each direction one to copy out and one to copy in."""

    device: torch.device
    compute: torch.cuda.Stream | None = None
    copies: tuple[torch.cuda.Stream, ...] = ()

    @classmethod
    def on(cls, device: torch.device) -> LaneDevice:
        """A lane on this device, with new streams."""
        if device.type != "cuda":
            return cls(device)
        streams = [torch.cuda.Stream(device) for _ in range(1 + 2 * len(DIRECTIONS))]
        return cls(device, streams[0], tuple(streams[1:]))


class Mailbox:
    """Runs the lanes of one process, each in a thread. With `overlap`, copies run beside the computation: on a GPU on
    streams of their own, on a CPU in threads of their own. Without it, copies and computation take turns."""

    def __init__(self, lanes: Sequence[LaneDevice], overlap: bool = True, move: Move = copy_direct) -> None:
        assert len({lane.device.type for lane in lanes}) == 1, "all lanes must have one type of device"
        self.lanes = tuple(lanes)
        self._transfers = _Transfers(self.lanes, overlap, move)
        self.transports: tuple[StageTransport, ...] = tuple(
            _LaneTransport(self._transfers, number) for number in range(len(lanes))
        )
        self._threads = [WorkerThread(f"lane {number}") for number in range(len(lanes))]

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Runs one task in each lane, all at once, under the caller's autocast, gradient mode and number of threads,
        which torch keeps per thread. The first task that fails ends all others, and its error is raised."""
        assert len(tasks) == len(self.lanes), (len(tasks), len(self.lanes))
        transfers, modes = self._transfers, _Modes()
        transfers.open()
        results: list[Any] = [None] * len(tasks)
        ended = [threading.Event() for _ in tasks]
        for number, (lane, task) in enumerate(zip(self.lanes, tasks, strict=True)):
            if lane.compute is not None:
                lane.compute.wait_stream(torch.cuda.current_stream(lane.device))

            def work(number: int = number, lane: LaneDevice = lane, task: Callable[[], T] = task) -> None:
                try:
                    with modes.enter(lane):
                        results[number] = task()
                except BaseException as error:
                    transfers.close(error)
                ended[number].set()

            self._threads[number].submit(work)
        try:
            for event in ended:
                event.wait()
        except BaseException as error:  # an interrupt: the lanes must not go on without this thread
            transfers.close(error)
            for event in ended:
                event.wait()
            raise
        for lane in self.lanes:
            if lane.compute is not None:
                torch.cuda.current_stream(lane.device).wait_stream(lane.compute)
        if transfers.error is not None:
            # Copies may still be writing into memory that is freed now.
            with suppress(RuntimeError):
                for lane in self.lanes:
                    if lane.compute is not None:
                        torch.cuda.synchronize(lane.device)
            raise transfers.error
        return results


class _LaneTransport:
    """The transport of one lane of a mailbox."""

    def __init__(self, transfers: _Transfers, number: int) -> None:
        self.recorder: Recorder | None = None
        self._transfers, self._lane = transfers, transfers.lanes[number]
        self._sent: dict[Op, deque[tuple[torch.cuda.Event, list[Tensor]]]] = {k: deque() for k in DIRECTIONS}
        beside = transfers.overlap and not transfers.cuda
        self._threads = {kind: WorkerThread(f"{kind} in lane {number}") for kind in DIRECTIONS if beside}

    def wait(self, handle: Any) -> Sequence[Tensor]:
        transfer = self._transfers.delivered(handle)
        if transfer.done is not None:
            torch.cuda.current_stream(self._lane.device).wait_event(transfer.done)
        return [
            buffer.as_strided(*layout)
            for buffer, layout in zip(transfer.buffers, transfer.layouts, strict=True)
        ]

    def finish(self) -> None:
        for thread in self._threads.values():
            thread.drain()
        for kind in DIRECTIONS:
            self._release(kind, 0)

    def receive(self, direction: Op, stage: int, micro: int, specs: Sequence[TensorSpec]) -> Any:
        transfer = self._transfers.get(direction, stage, micro)
        transfer.allocate([(torch.Size(spec.shape).numel(), spec.dtype) for spec in specs])
        return direction, stage, micro

    def send(self, direction: Op, stage: int, micro: int, tensors: Sequence[Tensor]) -> None:
        transfer = self._transfers.get(direction, stage + DIRECTIONS[direction], micro)
        full = [dense(tensor) for tensor in tensors]
        transfer.layouts = [(tensor.shape, tensor.stride()) for tensor in full]
        runs = [flat(tensor) for tensor in full]
        transfer.allocate([(run.numel(), run.dtype) for run in runs])
        if self._transfers.cuda:
            self._copy_on_stream(direction, stage, micro, transfer, runs)
            return
        transfers, recorder = self._transfers, self.recorder

        def copy() -> None:
            start = time.perf_counter()
            try:
                if transfers.error is None:
                    transfers.copy(transfer, runs)
                    if recorder is not None:
                        recorder.add(direction, stage, micro, start, time.perf_counter())
                    transfers.deliver(transfer)
            except BaseException as error:
                transfers.close(error)

        if self._threads:
            self._threads[direction].submit(copy)
        else:
            copy()

    def _copy_on_stream(
        self, direction: Op, stage: int, micro: int, transfer: _Transfer, runs: list[Tensor]
    ) -> None:
        """The copy waits on its stream for the sender's computation and for the buffers. The host waits for
        nothing."""
        compute, (out, into) = self._lane.compute, self._streams(direction, transfer.lane)
        assert compute is not None
        assert transfer.allocated is not None
        ready = compute.record_event()
        out.wait_event(ready)
        out.wait_event(transfer.allocated)
        # Both devices' current streams take part in a copy between two devices.
        with torch.cuda.stream(into), torch.cuda.stream(out):
            start = self.recorder.now(out) if self.recorder is not None else None
            self._transfers.copy(transfer, runs)
            if self.recorder is not None and start is not None:
                self.recorder.add(direction, stage, micro, start, self.recorder.now(out))
            transfer.done = into.record_event()
        self._transfers.deliver(transfer)
        self._sent[direction].append((transfer.done, runs))
        self._release(direction, _SENDS_AHEAD)

    def _streams(self, direction: Op, receiver: LaneDevice) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The stream out of this device and the one into the receiver's: the same stream on the same device."""
        lane, number = self._lane, list(DIRECTIONS).index(direction)
        assert lane.compute is not None
        assert receiver.compute is not None
        out = lane.copies[number] if self._transfers.overlap else lane.compute
        into = receiver.copies[len(DIRECTIONS) + number] if self._transfers.overlap else receiver.compute
        return (out, out) if receiver.device == lane.device else (out, into)

    def _release(self, direction: Op, keep: int) -> None:
        """Frees sent tensors in the order of the compute stream, since the host runs ahead of a GPU: the stream first
        waits for the copy, which was issued two computations ago and so is usually done."""
        while len(self._sent[direction]) > keep:
            done, _ = self._sent[direction].popleft()
            torch.cuda.current_stream(self._lane.device).wait_event(done)


_SENDS_AHEAD = 2


class _Transfers:
    """The transfers under way between the lanes of a mailbox."""

    def __init__(self, lanes: tuple[LaneDevice, ...], overlap: bool, move: Move) -> None:
        self.lanes, self.overlap, self.move = lanes, overlap, move
        self.cuda = lanes[0].device.type == "cuda"
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._open: dict[tuple[Op, int, int], _Transfer] = {}

    def open(self) -> None:
        """Before a step: drops what a failed step left behind."""
        with self._changed:
            self._open.clear()
            self.error = None

    def close(self, error: BaseException) -> None:
        """Ends every wait. The first error is kept."""
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()

    def get(self, direction: Op, stage: int, micro: int) -> _Transfer:
        """The transfer that sender and receiver both refer to. `stage` is the receiver's."""
        with self._changed:
            if self.error is not None:
                raise _Closed
            lane = self.lanes[stage % len(self.lanes)]
            return self._open.setdefault((direction, stage, micro), _Transfer(lane))

    def delivered(self, key: tuple[Op, int, int]) -> _Transfer:
        """Waits for a transfer: on a CPU until it is done, on a GPU until its copy is on a stream."""
        with self._changed:
            transfer = self._open[key]
            self._changed.wait_for(lambda: transfer.delivered or self.error is not None)
            if self.error is not None:
                raise _Closed
            return self._open.pop(key)

    def copy(self, transfer: _Transfer, tensors: Sequence[Tensor]) -> None:
        """Copies all tensors of a transfer."""
        for buffer, tensor in zip(transfer.buffers, tensors, strict=True):
            # The thread that copies may not be in the inference mode of the buffer.
            with torch.inference_mode(buffer.is_inference()):
                self.move(buffer, tensor)

    def deliver(self, transfer: _Transfer) -> None:
        """Wakes the receiver."""
        with self._changed:
            transfer.delivered = True
            self._changed.notify_all()


@dataclass
class _Transfer:
    """One transfer within a process. Sender or receiver, whichever comes first, allocates the receiver's buffers."""

    lane: LaneDevice
    buffers: list[Tensor] = field(default_factory=list)
    layouts: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    allocated: torch.cuda.Event | None = None
    """The receiver's compute stream no longer uses that memory."""
    done: torch.cuda.Event | None = None
    delivered: bool = False
    sizes: list[tuple[int, torch.dtype]] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def allocate(self, sizes: list[tuple[int, torch.dtype]]) -> None:
        with self.lock:
            if self.sizes is not None:
                assert self.sizes == sizes, f"sent and received sizes differ: {self.sizes} and {sizes}"
                return
            device, compute = self.lane.device, self.lane.compute
            with torch.cuda.stream(compute) if compute is not None else nullcontext():
                self.buffers = [torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes]
            self.allocated = compute.record_event() if compute is not None else None
            self.sizes = sizes


class _Modes:
    """The modes that torch keeps per thread, as the calling thread has them."""

    def __init__(self) -> None:
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        }
        self.threads = torch.get_num_threads()

    def enter(self, lane: LaneDevice) -> ExitStack:
        """Sets them in this thread."""
        stack = ExitStack()
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if lane.compute is not None:
            torch.cuda.set_device(lane.device)
            stack.enter_context(torch.cuda.stream(lane.compute))
        if self.inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for kind, dtype in self.autocast.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        # In this thread: with autograd's own threads one lane's backward would wait for another's.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        return stack


class _Closed(BaseException):
    """A different lane has failed."""
