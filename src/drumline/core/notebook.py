"""The live line of a notebook: one output below the cell that is replaced in place, and removed at the end.

Promises: works in Jupyter and everything that speaks its protocol; needs no widgets.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from rich.text import Text

_WIDTH = 110
"""Columns of the line: the usual width of a cell's output."""
_REDRAW_S = 0.5


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process. (IPython in a terminal has no kernel.)"""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class NotebookScreen:
    """The same interface as `progress.Screen`, for the output of a cell."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, draw: Callable[[int, bool], Text]) -> None:
        from IPython.display import display

        assert self._thread is None
        self._ended.clear()
        self._handle = display(_Line(draw(_WIDTH, False)), display_id=True)

        def redraw() -> None:
            while not self._ended.wait(_REDRAW_S):
                self._handle.update(_Line(draw(_WIDTH, False)))

        self._thread = threading.Thread(target=redraw, name="drumline-notebook", daemon=True)
        self._thread.start()

    def clear(self) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            self._handle.update(_Line(Text()))


class _Line:
    """A line of text as an output of a cell."""

    def __init__(self, text: Text) -> None:
        self._text = text.plain.rstrip()

    def __repr__(self) -> str:
        return self._text
