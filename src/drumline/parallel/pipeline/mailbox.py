"""Carries tensors between threads and devices of one process.

Promises: a thread for each place, kept between steps; on a GPU, copies run on streams of their own, each behind the
event it needs, and the host waits for nothing but the hand-over. Memory goes back in stream order. On one device,
places are virtual devices: copies between them are real. The first lane that fails ends the others.
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

from drumline.parallel.pipeline.boundary import TensorSpec
from drumline.parallel.pipeline.carriers import DIRECTIONS, Carrier, Hand, Ways, dense, flat
from drumline.parallel.pipeline.instructions import Kind

T = TypeVar("T")
Move = Callable[[Tensor, Tensor], None]
"""Copies the second tensor into the first; on a GPU, on the current stream."""


def straight(into: Tensor, tensor: Tensor) -> None:
    """A copy from memory to memory."""
    into.copy_(tensor, non_blocking=True)


def through_host(into: Tensor, tensor: Tensor) -> None:
    """A copy by way of the host's pinned memory: as slow as a real link, on one GPU."""
    assert into.device == tensor.device, "of two GPUs, each would copy on a stream of its own"
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    into.copy_(host, non_blocking=True)


@dataclass(frozen=True)
class Place:
    """Where one lane computes: a device, or a part of one (a virtual device). On a GPU, with streams of its own: one
    that computes, and one for each direction, out and in, that copies."""

    device: torch.device
    compute: torch.cuda.Stream | None = None
    copies: tuple[torch.cuda.Stream, ...] = ()

    @classmethod
    def on(cls, device: torch.device) -> Place:
        """With new streams."""
        if device.type != "cuda":
            return cls(device)
        streams = [torch.cuda.Stream(device) for _ in range(1 + 2 * len(DIRECTIONS))]
        return cls(device, streams[0], tuple(streams[1:]))


class Mailbox:
    """The lanes of one process, a thread for each place. `overlap` copies beside the computing: on streams of their
    own, on a CPU in threads of their own; without it, copies and computing take turns."""

    def __init__(self, places: Sequence[Place], overlap: bool = True, move: Move = straight) -> None:
        assert len({place.device.type for place in places}) == 1, "places of one kind of device"
        self.places = tuple(places)
        self._post = _Post(self.places, overlap, move)
        self.seats: tuple[Carrier, ...] = tuple(_Seat(self._post, number) for number in range(len(places)))
        """The carriers of the lanes, by place."""
        self._threads = [Hand(f"lane {number}") for number in range(len(places))]

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Runs a task at each place, all at once, under the caller's autocast, gradient mode and number of threads:
        those belong to a thread. The first that fails ends all others, and its error is raised."""
        assert len(tasks) == len(self.places), (len(tasks), len(self.places))
        post, modes = self._post, _Modes()
        post.open()
        results: list[Any] = [None] * len(tasks)
        ended = [threading.Event() for _ in tasks]
        for number, (place, task) in enumerate(zip(self.places, tasks, strict=True)):
            if place.compute is not None:
                place.compute.wait_stream(torch.cuda.current_stream(place.device))

            def work(number: int = number, place: Place = place, task: Callable[[], T] = task) -> None:
                try:
                    with modes.at(place):
                        results[number] = task()
                except BaseException as error:
                    post.close(error)
                ended[number].set()

            self._threads[number].do(work)
        try:
            for event in ended:
                event.wait()
        except BaseException as error:  # an interrupt: the lanes must not go on without us
            post.close(error)
            for event in ended:
                event.wait()
            raise
        for place in self.places:
            if place.compute is not None:
                torch.cuda.current_stream(place.device).wait_stream(place.compute)
        if post.error is not None:
            # Copies may still be on their way into memory that is now given back.
            with suppress(RuntimeError):
                for place in self.places:
                    if place.compute is not None:
                        torch.cuda.synchronize(place.device)
            raise post.error
        return results


class _Seat(Ways):
    """A place of a mailbox: the carrier of its lane."""

    def __init__(self, post: _Post, number: int) -> None:
        self._post, self._place = post, post.places[number]
        self._sent: dict[Kind, deque[tuple[torch.cuda.Event, list[Tensor]]]] = {
            k: deque() for k in DIRECTIONS
        }
        beside = post.overlap and not post.cuda
        self._hands = {kind: Hand(f"{kind} at place {number}") for kind in DIRECTIONS if beside}

    def wait(self, coming: Any) -> Sequence[Tensor]:
        letter: _Letter = self._post.taken(coming)
        if letter.done is not None:
            torch.cuda.current_stream(self._place.device).wait_event(letter.done)
        return [room.as_strided(*layout) for room, layout in zip(letter.rooms, letter.layouts, strict=True)]

    def finish(self) -> None:
        for hand in self._hands.values():
            hand.settle()
        for kind in DIRECTIONS:
            self._release(kind, 0)

    def _receive(self, kind: Kind, stage: int, micro: int, specs: Sequence[TensorSpec]) -> Any:
        letter = self._post.letter(kind, stage, micro)
        letter.make_room([(torch.Size(spec.shape).numel(), spec.dtype) for spec in specs])
        return kind, stage, micro

    def _send(self, kind: Kind, stage: int, micro: int, tensors: Sequence[Tensor]) -> None:
        letter = self._post.letter(kind, stage + DIRECTIONS[kind], micro)
        full = [dense(tensor) for tensor in tensors]
        letter.layouts = [(tensor.shape, tensor.stride()) for tensor in full]
        runs = [flat(tensor) for tensor in full]
        letter.make_room([(run.numel(), run.dtype) for run in runs])
        if self._post.cuda:
            self._copy_on_stream(kind, stage, micro, letter, runs)
            return
        post, recorder = self._post, self.recorder

        def copy() -> None:
            start = time.perf_counter()
            try:
                if post.error is None:
                    post.move_all(letter, runs)
                    if recorder is not None:
                        recorder.note(kind, stage, micro, start, time.perf_counter())
                    post.deliver(letter)
            except BaseException as error:
                post.close(error)

        if self._hands:
            self._hands[kind].do(copy)
        else:
            copy()

    def _copy_on_stream(
        self, kind: Kind, stage: int, micro: int, letter: _Letter, runs: list[Tensor]
    ) -> None:
        """The copy waits, on its stream, for the sender's computing and for the room; the host waits for nothing."""
        compute, (out, into) = self._place.compute, self._streams(kind, letter.place)
        assert compute is not None
        assert letter.made is not None
        ready = compute.record_event()
        out.wait_event(ready)
        out.wait_event(letter.made)
        # Both devices' current streams take part in a copy between two devices.
        with torch.cuda.stream(into), torch.cuda.stream(out):
            start = self.recorder.now(out) if self.recorder is not None else None
            self._post.move_all(letter, runs)
            if self.recorder is not None and start is not None:
                self.recorder.note(kind, stage, micro, start, self.recorder.now(out))
            letter.done = into.record_event()
        self._post.deliver(letter)
        self._sent[kind].append((letter.done, runs))
        self._release(kind, _SENDS_AHEAD)

    def _streams(self, kind: Kind, receiver: Place) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Out of this device, and into the receiver's; one and the same where both are one."""
        place, number = self._place, list(DIRECTIONS).index(kind)
        assert place.compute is not None
        assert receiver.compute is not None
        out = place.copies[number] if self._post.overlap else place.compute
        into = receiver.copies[len(DIRECTIONS) + number] if self._post.overlap else receiver.compute
        return (out, out) if receiver.device == place.device else (out, into)

    def _release(self, kind: Kind, keep: int) -> None:
        """On a GPU the host runs ahead, so memory goes back in the order of the computing stream: after it has waited
        for the copy. It waits for one sent two computings ago, so hardly ever really."""
        while len(self._sent[kind]) > keep:
            done, _ = self._sent[kind].popleft()
            torch.cuda.current_stream(self._place.device).wait_event(done)


_SENDS_AHEAD = 2


class _Post:
    """What the seats of a mailbox share."""

    def __init__(self, places: tuple[Place, ...], overlap: bool, move: Move) -> None:
        self.places, self.overlap, self.move = places, overlap, move
        self.cuda = places[0].device.type == "cuda"
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._letters: dict[tuple[Kind, int, int], _Letter] = {}

    def open(self) -> None:
        """Before a step: whatever a failed one left is forgotten."""
        with self._changed:
            self._letters.clear()
            self.error = None

    def close(self, error: BaseException) -> None:
        """Ends every wait with an error; the first one counts."""
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()

    def letter(self, kind: Kind, stage: int, micro: int) -> _Letter:
        """The one transfer that both sides speak of: `stage` is the receiver's."""
        with self._changed:
            if self.error is not None:
                raise _Closed
            place = self.places[stage % len(self.places)]
            return self._letters.setdefault((kind, stage, micro), _Letter(place))

    def taken(self, key: tuple[Kind, int, int]) -> _Letter:
        """Waits for a letter: on a CPU until it has arrived, on a GPU until its copy is on a stream."""
        with self._changed:
            letter = self._letters[key]
            self._changed.wait_for(lambda: letter.delivered or self.error is not None)
            if self.error is not None:
                raise _Closed
            return self._letters.pop(key)

    def move_all(self, letter: _Letter, tensors: Sequence[Tensor]) -> None:
        """The copies of one letter."""
        for room, tensor in zip(letter.rooms, tensors, strict=True):
            with torch.inference_mode(
                room.is_inference()
            ):  # the thread that copies knows nothing of the mode
                self.move(room, tensor)

    def deliver(self, letter: _Letter) -> None:
        """Tells the receiver."""
        with self._changed:
            letter.delivered = True
            self._changed.notify_all()


@dataclass
class _Letter:
    """One transfer within a process. Room is made in the receiver's memory by whoever comes first."""

    place: Place
    rooms: list[Tensor] = field(default_factory=list)
    layouts: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    made: torch.cuda.Event | None = None
    """The receiver's computing stream no longer uses that memory."""
    done: torch.cuda.Event | None = None
    delivered: bool = False
    sizes: list[tuple[int, torch.dtype]] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def make_room(self, sizes: list[tuple[int, torch.dtype]]) -> None:
        with self.lock:
            if self.sizes is not None:
                assert self.sizes == sizes, f"sent and received differ: {self.sizes} and {sizes}"
                return
            device, compute = self.place.device, self.place.compute
            with torch.cuda.stream(compute) if compute is not None else nullcontext():
                self.rooms = [torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes]
            self.made = compute.record_event() if compute is not None else None
            self.sizes = sizes


class _Modes:
    """What torch keeps for each thread, as the calling thread has it."""

    def __init__(self) -> None:
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        }
        self.threads = torch.get_num_threads()

    def at(self, place: Place) -> ExitStack:
        """Enters them on this thread."""
        stack = ExitStack()
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if place.compute is not None:
            torch.cuda.set_device(place.device)
            stack.enter_context(torch.cuda.stream(place.compute))
        if self.inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for kind, dtype in self.autocast.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        # In this thread: autograd's own would make one lane's backward wait for another's.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        return stack


class _Closed(BaseException):
    """Another lane has failed."""
