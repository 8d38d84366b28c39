"""Processes that work for this one: they load batches, pack and verify datasets; and workers, which end with their
launcher.

Promises: results come in the order of the tasks, and a bounded number is under way. The processes leave Ctrl-C and
SIGTERM to their owner, and none outlives it, however it ends. What a task raises is raised here; a process that is
killed raises `WorkerKilled`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.synchronize import Event
from types import FrameType, TracebackType
from typing import Any, TypeVar

from drumline.core.environment import LAUNCHER, TRIAL

Task = TypeVar("Task")
Result = TypeVar("Result")


class WorkerKilled(Exception):
    """A process of the pool, or the fork server that starts them, is gone."""


def map_in_processes(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    workers: int,
    *,
    preload: str,
    pending: int = 2,
) -> Generator[Result, None, None]:
    """`function(task)` for each task, in order, with up to `pending` tasks per process under way. `preload` names the
    module that a process needs: the fork server imports it once. Close the generator to end the processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["drumline.core.forkserver", preload])
    stopping = context.Event()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (stopping,))
    futures: deque[Future[Result]] = deque()
    waiting = iter(tasks)
    try:
        while True:
            for task in waiting:
                futures.append(_submit(pool, function, task))
                if len(futures) >= pending * workers:
                    break
            if not futures:
                return
            try:
                result = futures.popleft().result()
            except BrokenProcessPool as error:
                raise WorkerKilled(str(error)) from error
            yield result
    finally:
        stopping.set()
        pool.shutdown(cancel_futures=True)


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Turns Ctrl-C and SIGTERM into a question that the caller asks between samples. Raised at any moment, they could
    strike while the pool holds a lock, and its shutdown would wait for ever. A second one is raised at once."""
    seen: list[int] = []

    def record(number: int, _: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield lambda: False
        return
    before = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    except Exception as error:
        if (
            seen
        ):  # a terminal's Ctrl-C also ends processes that do not ignore it yet, so errors may follow from it
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_parent() -> None:
    """Called by a worker or a short run of `why` at its start: the kernel kills it when what started it ends, even by
    kill -9.

    Does nothing in other processes (a run under nohup must outlive its shell). On kernels other than Linux it only
    checks that the parent still exists.
    """
    parent = os.environ.get(LAUNCHER) or os.environ.get(TRIAL)
    if not parent:
        return
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)


_PR_SET_PDEATHSIG = 1


def _submit(pool: ProcessPoolExecutor, function: Callable[[Task], Result], task: Task) -> Future[Result]:
    try:
        with _main_hidden():
            return pool.submit(_run, function, task)
    except (BrokenProcessPool, OSError, EOFError) as error:  # the fork server may be gone
        raise WorkerKilled(str(error)) from error


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Keeps a process that starts now from importing the script of this one, which it does not need: a script that
    starts a run without `if __name__ == "__main__"` would start it again in each process."""
    main = sys.modules["__main__"]
    before: dict[str, Any] = {
        name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)
    }
    main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(before)


_stopping: Event | None = None
"""In a worker: set when its owner wants no more results."""


def _start_worker(stopping: Event) -> None:
    global _stopping
    _stopping = stopping
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _report_unless_owner_is_gone
    threading.Thread(target=_end_with_owner, daemon=True).start()


def _run(function: Callable[[Task], Result], task: Task) -> Result:
    if _stopping is not None and _stopping.is_set():
        raise InterruptedError("the owner wants no more results")
    return function(task)


def _end_with_owner() -> None:
    """A process would wait for tasks for ever: it holds the other end of their pipe itself. Its parent is of no help:
    that is the fork server, which lives as long as its children do."""
    owner = multiprocessing.parent_process()
    assert owner is not None
    wait([owner.sentinel])
    os._exit(1)


def _report_unless_owner_is_gone(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """An owner that is killed while it fetches a tensor breaks the connection, and the thread of multiprocessing that
    hands tensors over would print a traceback. What a task raises goes to the owner instead."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)
