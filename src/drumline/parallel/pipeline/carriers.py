"""How tensors travel between the stages of a pipeline: what every way of carrying them has in common.

Promises: a tensor arrives with the values and the memory layout (strides) it was sent with, so the kernels behind it
take the same way as in one process; always in a buffer of its own, so a stage may change it in place. Sending never
waits for the receiver; only `wait` and `finish` do. A sent tensor is kept until it has been sent, no longer.
`mailbox.py` carries between threads and devices of one process, `wire.py` between processes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from torch import Tensor

from drumline.parallel.pipeline.boundary import TensorSpec
from drumline.parallel.pipeline.instructions import Kind
from drumline.parallel.pipeline.record import Recorder

DIRECTIONS = {Kind.SEND_OUTPUT: 1, Kind.SEND_GRADIENT: -1}
"""From the sender's stage to the receiver's."""


class Carrier(Protocol):
    """One rank's way to the stages before and after its own. `stage` is always the one that computes here."""

    recorder: Recorder | None
    """Where the transfers of what is sent here are noted."""

    def send_output(self, stage: int, micro: int, tensors: Sequence[Tensor]) -> None:
        """Begins to send to stage + 1."""

    def receive_input(self, stage: int, micro: int, specs: Sequence[TensorSpec]) -> Any:
        """Makes room for what stage - 1 sends, and begins to receive it; gives what to `wait` for."""

    def send_gradient(self, stage: int, micro: int, tensors: Sequence[Tensor]) -> None:
        """Begins to send to stage - 1."""

    def receive_gradient(self, stage: int, micro: int, specs: Sequence[TensorSpec]) -> Any:
        """Makes room for what stage + 1 sends, and begins to receive it; gives what to `wait` for."""

    def wait(self, coming: Any) -> Sequence[Tensor]:
        """What has arrived; on a GPU it is the computing stream that waits, not the host."""

    def finish(self) -> None:
        """At the end of a step: everything is sent."""


class Ways:
    """Both ways by one pair of methods. The kind is the sender's, on either side."""

    recorder: Recorder | None = None

    def send_output(self, stage: int, micro: int, tensors: Sequence[Tensor]) -> None:
        self._send(Kind.SEND_OUTPUT, stage, micro, tensors)

    def send_gradient(self, stage: int, micro: int, tensors: Sequence[Tensor]) -> None:
        self._send(Kind.SEND_GRADIENT, stage, micro, tensors)

    def receive_input(self, stage: int, micro: int, specs: Sequence[TensorSpec]) -> Any:
        return self._receive(Kind.SEND_OUTPUT, stage, micro, specs)

    def receive_gradient(self, stage: int, micro: int, specs: Sequence[TensorSpec]) -> Any:
        return self._receive(Kind.SEND_GRADIENT, stage, micro, specs)

    def _send(self, kind: Kind, stage: int, micro: int, tensors: Sequence[Tensor]) -> None:
        raise NotImplementedError

    def _receive(self, kind: Kind, stage: int, micro: int, specs: Sequence[TensorSpec]) -> Any:
        raise NotImplementedError


class Hand:
    """A thread that does one job after the other, and ends with its owner. Jobs keep their errors to themselves."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_do_jobs, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def do(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def settle(self) -> None:
        """Waits until all that was asked for is done."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()


def _do_jobs(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it may hold tensors, and the next one may be long in coming


def dense(tensor: Tensor) -> Tensor:
    """Itself, where it fills its memory without gaps or overlaps in whatever order; otherwise a copy that does, in
    the order of its strides."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return tensor.clone()
            expected *= size
    return tensor


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's memory, in its order."""
    return tensor.as_strided((tensor.numel(),), (1,))
