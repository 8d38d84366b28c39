"""What a person sees of a run while it runs: one display, drawn by rank 0, on stderr.

Promises: stdout stays clean; a terminal gets a live bar on one line of any width, gone at the end; a file or pipe
gets at most a plain line every few seconds without control characters; Ctrl-C leaves a usable terminal.
Refuses to cost time: `step` only keeps a value, drawing happens on rich's own thread.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sized
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TextIO, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from drumline.observe import wording
from drumline.observe.wording import Pace
from drumline.text import message

Item = TypeVar("Item")

PLAIN_EVERY_S = 5.0
"""Off a terminal, seconds between two lines of progress."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    epoch: float
    epochs: float
    step: int
    steps: int
    loss: float | None
    images_per_s: float
    data_share: float
    lr: float
    loss_step: int = 0
    """The step that the loss is of."""
    loss_lag_s: float = 0.0
    """How long ago that step was, about."""


LAG_SHOWN_S = 3.0
"""From this lag on the loss is shown with its step."""


class Display(Protocol):
    """`begin`, then any of the others, then `end`; `note` and `result` also work before and after."""

    def begin(self, steps_total: int, steps_done: int, epochs: float) -> None: ...
    def step(self, progress: Progress) -> None: ...
    def evaluation(self, done: int, total: int) -> None:
        """Samples evaluated; `done == total` ends it."""

    def result(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def end(self) -> None: ...


def make_display(rank: int, stream: TextIO | None = None) -> Display:
    """The display for this process: rank 0 draws (on stderr unless told), the others are silent."""
    stream = stream or sys.stderr
    if rank != 0 or stream is None:  # Python has no stderr when it was closed at the start
        return SilentDisplay()
    return RichDisplay(stream) if _can_draw(stream) else PlainDisplay(stream)


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
    if _can_draw(stream):
        yield from _progress_drawn(items, text, total, stream)
    else:
        yield from _progress_plain(items, text, total, stream)


class SilentDisplay:
    """The display of every rank but 0."""

    def begin(self, steps_total: int, steps_done: int, epochs: float) -> None:
        pass

    def step(self, progress: Progress) -> None:
        pass

    def evaluation(self, done: int, total: int) -> None:
        pass

    def result(self, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def end(self) -> None:
        pass


class PlainDisplay:
    """Plain lines for a file or a pipe: every result and note, and progress at most each `every` seconds."""

    def __init__(
        self, stream: TextIO, every: float = PLAIN_EVERY_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._every = every
        self._now = now
        self._next = now()
        self._pace = Pace()
        self._unheard = False

    def begin(self, steps_total: int, steps_done: int, epochs: float) -> None:
        pass

    def step(self, progress: Progress) -> None:
        now = self._now()
        self._pace.update(now, progress.step)
        if self._due(now):
            parts = describe(progress, self._pace.seconds_left(now, progress.steps))
            self._write("  ".join(part.text for part in parts))

    def evaluation(self, done: int, total: int) -> None:
        self._pace.pause()
        if done < total and self._due(self._now()):
            self._write(f"evaluating  {wording.count(done)}/{wording.count(total)}")

    def result(self, text: str) -> None:
        self._write(text)

    def note(self, text: str) -> None:
        self._write(text)

    def end(self) -> None:
        pass

    def _due(self, now: float) -> bool:
        if now < self._next:
            return False
        self._next = now + self._every
        return True

    def _write(self, text: str) -> None:
        if self._unheard:
            return
        try:
            # One write for the whole line, so that lines of two threads do not mix.
            self._stream.write(message(text) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            # Whoever read this is gone (a closed pipe, a lost connection); the run goes on, log.txt has it all.
            self._unheard = True


class RichDisplay:
    """A live bar on a terminal, redrawn a few times a second, with results and notes above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._screen = _Screen(self._console)
        self._start = Progress(0.0, 0.0, 0, 0, None, 0.0, 0.0, 0.0)
        self._progress: Progress | None = None
        self._evaluated: tuple[int, int] | None = None
        self._pace = Pace()
        self._widths: list[int] = []

    def begin(self, steps_total: int, steps_done: int, epochs: float) -> None:
        epoch = epochs * steps_done / max(1, steps_total)
        self._start = Progress(epoch, epochs, steps_done, steps_total, None, 0.0, 0.0, 0.0)
        self._screen.show(self._draw)

    def step(self, progress: Progress) -> None:
        self._progress = progress
        self._pace.update(time.monotonic(), progress.step)

    def evaluation(self, done: int, total: int) -> None:
        self._pace.pause()
        self._evaluated = (done, total) if done < total else None

    def result(self, text: str) -> None:
        self._say(text, style="bold")

    def note(self, text: str) -> None:
        self._say(text)

    def end(self) -> None:
        self._screen.clear()

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(message(text), style=style))

    def _draw(self, width: int, ascii_only: bool) -> Text:
        progress, evaluated = self._progress or self._start, self._evaluated
        done = progress.step / max(1, progress.steps)
        if evaluated is not None:
            parts = [Part(_epoch(progress)), *_counted("evaluating", *evaluated, None)]
            done = evaluated[0] / max(1, evaluated[1])
        elif self._progress is None:
            parts = [Part(_epoch(progress)), Part(_steps(progress), 1), Part("starting")]
        else:
            parts = describe(progress, self._pace.seconds_left(time.monotonic(), progress.steps))
        # Each part keeps the widest width it had, so that the line does not dance as its numbers change.
        if len(self._widths) != len(parts):
            self._widths = [0] * len(parts)
        self._widths = [max(old, len(part.text)) for old, part in zip(self._widths, parts, strict=True)]
        parts = [
            Part(part.text.ljust(wide), part.spare) for part, wide in zip(parts, self._widths, strict=True)
        ]
        return bar_line(parts, done, width, ascii_only)


class Part(NamedTuple):
    """A piece of a progress line. Where the line is too long, the part with the highest `spare` goes first."""

    text: str
    spare: int = 0


def describe(progress: Progress, seconds_left: float | None) -> list[Part]:
    """The parts of a progress line, in the order they are shown. Pure."""
    loss = "loss -" if progress.loss is None else f"loss {wording.loss(progress.loss)}"
    if progress.loss is not None and progress.loss_lag_s >= LAG_SHOWN_S:
        loss += f" (step {wording.count(progress.loss_step)})"
    return [
        Part(_epoch(progress), 1),
        Part(_steps(progress), 5),
        Part(loss),
        Part(wording.rate(progress.images_per_s, "img"), 3),
        Part(f"data wait {wording.share(progress.data_share)}", 4),
        Part(f"lr {progress.lr:.3g}", 6),
        Part("-:-- left" if seconds_left is None else f"{wording.duration(seconds_left)} left", 2),
    ]


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


def _epoch(progress: Progress) -> str:
    return f"epoch {progress.epoch:.1f}/{progress.epochs:.4g}"


def _steps(progress: Progress) -> str:
    return f"step {wording.count(progress.step)}/{wording.count(progress.steps)}"


def _bar(done: float, width: int, ascii_only: bool) -> Text:
    # The two halves differ in shape too, for terminals without colour.
    full, rest = ("#", "-") if ascii_only else ("━", "─")
    filled = round(min(1.0, max(0.0, done)) * width)
    return Text.assemble((full * filled, "cyan"), (rest * (width - filled), "dim"))


def _counted(text: str, done: int, total: int | None, seconds_left: float | None) -> list[Part]:
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


class _Screen:
    """The live line of a terminal, erased at the end even if nobody comes to clear it. A line that another process
    writes over it (`story.say`) leaves it intact: it is one line, and is drawn again below."""

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


def _can_draw(stream: TextIO) -> bool:
    # rich also takes a file for a terminal when FORCE_COLOR is set; a bar needs a real one.
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _progress_drawn(items: Iterable[Item], text: str, total: int | None, stream: TextIO) -> Generator[Item]:
    pace, done, show_from = Pace(), 0, time.monotonic() + 1.0

    def draw(width: int, ascii_only: bool) -> Text:
        now = time.monotonic()
        if now < show_from:
            return Text()
        left = None if total is None else pace.seconds_left(now, total)
        parts = _counted(text, done, total, left)
        if total is None:
            return Text("  ".join(part.text for part in parts))
        return bar_line(parts, done / max(1, total), width, ascii_only)

    screen = _Screen(Console(file=stream))
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
            stream.write("  ".join(part.text for part in _counted(text, done, total, left)) + "\n")
            stream.flush()
