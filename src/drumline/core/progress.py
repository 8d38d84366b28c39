"""How far something that takes long has come: a bar on a terminal, plain lines elsewhere.

Promises: nothing is written to stdout; a terminal gets one live line of any width, erased at the end; a file or pipe
gets a plain line every few seconds, without control characters.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sized
from typing import NamedTuple, TextIO, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from drumline.core import wording
from drumline.core.notebook import NotebookScreen, in_notebook
from drumline.core.wording import Pace

Item = TypeVar("Item")

PLAIN_EVERY_S = 5.0
"""Off a terminal, seconds between two lines of progress."""


def progress(
    items: Iterable[Item], text: str, total: int | None = None, stream: TextIO | None = None
) -> Generator[Item]:
    """Pass `items` on and show how far they are: for anything that may take over five seconds.

    A terminal gets a bar after one second, gone at the end; elsewhere a plain line every five seconds.
    Not for use between a display's `begin` and `end`.
    """
    stream = stream or sys.stderr
    if total is None and isinstance(items, Sized):
        total = len(items)
    if can_draw(stream):
        yield from _progress_drawn(items, text, total, stream)
    else:
        yield from _progress_plain(items, text, total, stream)


class Part(NamedTuple):
    """A piece of a progress line. Where the line is too long, the part with the highest `spare` goes first."""

    text: str
    spare: int = 0


def bar_line(parts: list[Part], done: float, width: int, ascii_only: bool = False) -> Text:
    """The first part, a bar and the other parts, as many as `width` allows, none of them cut in two. Pure."""
    # Free columns at the right: a Ctrl-C writes ^C behind the cursor, which must not start a new line.
    width -= 3
    while (spare := max(part.spare for part in parts)) > 0:
        bar_room = 2 + _BAR_MIN if spare > _SPARE_BEFORE_BAR else 0
        if sum(len(part.text) + 2 for part in parts) - 2 + bar_room <= width:
            break
        parts = [part for part in parts if part.spare < spare]
    first, *others = (part.text for part in parts)
    room = width - sum(len(part.text) + 2 for part in parts)
    if room < _BAR_MIN:
        return Text("  ".join([first, *others]))
    bar = _bar(done, min(room, _BAR_MAX), ascii_only)
    return Text.assemble(first, "  ", bar, *(f"  {text}" for text in others))


_BAR_MIN, _BAR_MAX = 6, 40
_SPARE_BEFORE_BAR = 2
"""Parts with a higher `spare` go before the bar does."""


def _bar(done: float, width: int, ascii_only: bool) -> Text:
    # The two halves differ in shape too, for terminals without colour.
    full, rest = ("#", "-") if ascii_only else ("━", "─")
    filled = round(min(1.0, max(0.0, done)) * width)
    return Text.assemble((full * filled, "cyan"), (rest * (width - filled), "dim"))


def counted_parts(text: str, done: int, total: int | None, seconds_left: float | None) -> list[Part]:
    count = wording.count(done) if total is None else f"{wording.count(done)}/{wording.count(total)}"
    left = [] if seconds_left is None else [Part(f"{wording.duration(seconds_left)} left", 1)]
    return [Part(text), Part(count), *left]


class _Drawing:
    """A rich renderable that asks for its line anew at each refresh."""

    def __init__(self, draw: Callable[[int, bool], Text]) -> None:
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = self._draw(options.max_width, options.ascii_only)
        line.no_wrap = True
        line.overflow = "ellipsis"
        yield line


class Screen:
    """The live line of a terminal, erased at the end even if nobody comes to clear it. A line that another process
    writes over it (`text_log.say`) leaves it intact: it is one line, and is drawn again below."""

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


_REDRAWS_PER_S = 4


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
        parts = counted_parts(text, done, total, left)
        if total is None:
            return Text("  ".join(part.text for part in parts))
        return bar_line(parts, done / max(1, total), width, ascii_only)

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
            stream.write("  ".join(part.text for part in counted_parts(text, done, total, left)) + "\n")
            stream.flush()
