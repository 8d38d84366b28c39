"""Runs an iterator in a thread of its own, a few items ahead of its consumer.

Promises: items come in order. What the thread raises is raised in the consumer. Closing ends the thread before it
returns, so whatever the iterator holds (processes, files, buffers) is released.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from contextlib import closing
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


def prefetch(items: Generator[Item, None, None], ready: int) -> Generator[Item, None, None]:
    """The items of a generator, with up to `ready` of them waiting. Closes the generator at the end."""
    waiting: queue.Queue[tuple[object, BaseException | None]] = queue.Queue(ready)
    ending = threading.Event()

    def put(item: object, error: BaseException | None = None) -> bool:
        while not ending.is_set():
            try:
                waiting.put((item, error), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        failure: BaseException | None = None
        try:
            with closing(items):
                for item in items:
                    if not put(item):
                        break
        except BaseException as error:
            failure = error
        put(_END, failure)

    thread = threading.Thread(target=work, name="drumline-feed", daemon=True)
    thread.start()
    try:
        while True:
            item, error = waiting.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item  # type: ignore[misc]
    finally:
        ending.set()
        thread.join()
