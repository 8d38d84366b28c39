"""Progress of anything that takes long: a bar on a terminal, plain lines elsewhere.

Writes nothing to stdout. A terminal gets one live line of any width, which is erased at the end. A file or pipe gets
a plain line every few seconds, without control characters. A notebook gets one output below the cell, which is
replaced in place and removed at the end; it needs no widgets.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sized
from typing import Any, NamedTuple, TextIO, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from drumline.core.text import duration

Item = TypeVar("Item")

PLAIN_EVERY_S = 5.0
"""Seconds between two plain lines of progress."""


def progress(
    items: Iterable[Item], text: str, total: int | None = None, stream: TextIO | None = None
) -> Generator[Item]:
    """Yields `items` and shows how many are done. Use it for anything that may take over five seconds.

    A terminal gets a bar after one second, which is erased at the end; a file or pipe gets a plain line every five
    seconds. Must not be used between a display's `begin` and `end`.
    """
    stream = stream or sys.stderr
    if total is None and isinstance(items, Sized):
        total = len(items)
    if can_draw(stream):
        yield from _progress_drawn(items, text, total, stream)
    else:
        yield from _progress_plain(items, text, total, stream)


class Piece(NamedTuple):
    """A piece of a progress line. If the line is too long, the piece with the highest `spare` is dropped first."""

    text: str
    spare: int = 0


def bar_line(pieces: list[Piece], done: float, width: int, ascii_only: bool = False) -> Text:
    """The first piece, a bar and as many of the other pieces as `width` allows, none of them truncated. Pure."""
    # Free columns at the right: a Ctrl-C writes ^C behind the cursor, which must not start a new line.
    width -= 3
    while (spare := max(piece.spare for piece in pieces)) > 0:
        bar_room = 2 + _BAR_MIN if spare > _SPARE_BEFORE_BAR else 0
        if sum(len(piece.text) + 2 for piece in pieces) - 2 + bar_room <= width:
            break
        pieces = [piece for piece in pieces if piece.spare < spare]
    first, *others = (piece.text for piece in pieces)
    room = width - sum(len(piece.text) + 2 for piece in pieces)
    if room < _BAR_MIN:
        return Text("  ".join([first, *others]))
    bar = _bar(done, min(room, _BAR_MAX), ascii_only)
    return Text.assemble(first, "  ", bar, *(f"  {text}" for text in others))


_BAR_MIN, _BAR_MAX = 6, 40
_SPARE_BEFORE_BAR = 2
"""Pieces with a higher `spare` are dropped before the bar."""


def _bar(done: float, width: int, ascii_only: bool) -> Text:
    # The two halves differ in shape too, for terminals without colour.
    full, rest = ("#", "-") if ascii_only else ("━", "─")
    filled = round(min(1.0, max(0.0, done)) * width)
    return Text.assemble((full * filled, "cyan"), (rest * (width - filled), "dim"))


def counted_pieces(text: str, done: int, total: int | None, seconds_left: float | None) -> list[Piece]:
    count = f"{done:,}" if total is None else f"{done:,}/{total:,}"
    left = [] if seconds_left is None else [Piece(f"{duration(seconds_left)} left", 1)]
    return [Piece(text), Piece(count), *left]


class Pace:
    """Recent speed of a count, over about the last half minute or the last forty updates."""

    _GAP_S = 0.75
    _KEPT = 40

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=self._KEPT)
        self._speed = 0.0
        self._last = (0.0, 0)
        self._paused = False

    def update(self, now: float, done: int) -> None:
        """Records that `done` items are done at time `now`."""
        if self._paused:
            self._seen.clear()
            self._paused = False
        if self._seen:
            then, before = self._seen[0]
            if now > then and done > before:
                self._speed = (done - before) / (now - then)
        if not self._seen or now - self._seen[-1][0] >= self._GAP_S:
            self._seen.append((now, done))
        self._last = (now, done)

    def pause(self) -> None:
        """Excludes the time until the next update from the speed."""
        self._paused = True

    def seconds_left(self, now: float, total: int) -> float | None:
        """None before two updates."""
        if not self._speed:
            return None
        then, done = self._last
        return max(0.0, (total - done) / self._speed - (now - then))


class _Drawing:
    """A rich renderable that draws its line at each refresh."""

    def __init__(self, draw: Callable[[int, bool], Text]) -> None:
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = self._draw(options.max_width, options.ascii_only)
        line.no_wrap = True
        line.overflow = "ellipsis"
        yield line


class Screen:
    """The live line of a terminal. It is erased at the end, also by an exit that does not call `clear`. A line that
    another process writes over it leaves it intact: it is one line, and is drawn again below."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def show(self, draw: Callable[[int, bool], Text]) -> None:
        assert self._live is None
        self._live = Live(
            _Drawing(draw),
            console=self._console,
            refresh_per_second=_REDRAWS_PER_S,
            transient=True,
            # Prints would break the bar; but what a pipe on stdout waits for must not go to stderr.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=self._console.file is sys.stderr,
        )
        self._live.start(refresh=True)
        atexit.register(self.clear)

    def clear(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            atexit.unregister(self.clear)


class NotebookScreen:
    """The same interface as `Screen`, for the output of a cell."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, draw: Callable[[int, bool], Text]) -> None:
        from IPython.display import display

        assert self._thread is None
        self._ended.clear()
        self._handle = display(_Line(draw(_CELL_WIDTH, False)), display_id=True)

        def redraw() -> None:
            while not self._ended.wait(_CELL_REDRAW_S):
                self._handle.update(_Line(draw(_CELL_WIDTH, False)))

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


_REDRAWS_PER_S = 4
_CELL_WIDTH = 110
"""Columns of the line in a notebook: the usual width of a cell's output."""
_CELL_REDRAW_S = 0.5


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process. (IPython in a terminal has no kernel.)"""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def make_screen(console: Console) -> Screen | NotebookScreen:
    """Where a live line can be drawn for a person who sees this console."""
    return NotebookScreen() if in_notebook() else Screen(console)


def can_draw(stream: TextIO) -> bool:
    """Whether a person sees lines replaced in place there: on a terminal or in a notebook."""
    if in_notebook():
        return True
    # rich also takes a file for a terminal when FORCE_COLOR is set; a bar needs a real one.
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _progress_drawn(items: Iterable[Item], text: str, total: int | None, stream: TextIO) -> Generator[Item]:
    pace, done, show_from = Pace(), 0, time.monotonic() + 1.0

    def draw(width: int, ascii_only: bool) -> Text:
        now = time.monotonic()
        if now < show_from:
            return Text()
        left = None if total is None else pace.seconds_left(now, total)
        pieces = counted_pieces(text, done, total, left)
        if total is None:
            return Text("  ".join(piece.text for piece in pieces))
        return bar_line(pieces, done / max(1, total), width, ascii_only)

    screen = make_screen(Console(file=stream))
    screen.show(draw)
    try:
        for item in items:
            yield item
            done += 1
            pace.update(time.monotonic(), done)
    finally:
        screen.clear()


def _progress_plain(items: Iterable[Item], text: str, total: int | None, stream: TextIO) -> Generator[Item]:
    pace, next_line = Pace(), time.monotonic() + PLAIN_EVERY_S
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        pace.update(now, done)
        if now >= next_line:
            next_line = now + PLAIN_EVERY_S
            left = None if total is None else pace.seconds_left(now, total)
            stream.write("  ".join(piece.text for piece in counted_pieces(text, done, total, left)) + "\n")
            stream.flush()
