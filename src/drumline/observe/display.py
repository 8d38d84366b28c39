"""The display of a run's progress, drawn by rank 0 on stderr.

Promises: nothing is written to stdout. A terminal shows a live bar on one line of any width, which is erased at the
end; a file or pipe gets at most one plain line every few seconds, without control characters. Ctrl-C leaves a usable
terminal. `step` only stores a value; rich draws on its own thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.text import Text

from drumline.core.progress import PLAIN_EVERY_S, Pace, Piece, bar_line, can_draw, counted_pieces, make_screen
from drumline.core.text import duration, loss_text, message, percent, rate


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
    """The step that the loss belongs to."""
    loss_lag_s: float = 0.0
    """About how long ago that step was."""


LAG_SHOWN_S = 3.0
"""From this lag on, the loss is shown with its step."""


class Display:
    """The interface, and the display of every rank but 0, which shows nothing. Call `begin`, then the other methods,
    then `end`. `log` and `result` also work before and after."""

    def begin(self, steps_total: int, steps_done: int, epochs: float) -> None: ...
    def step(self, progress: Progress) -> None: ...
    def evaluation(self, done: int, total: int) -> None:
        """Shows how many samples are evaluated, until `done == total`."""

    def result(self, text: str) -> None: ...
    def log(self, text: str) -> None: ...
    def end(self) -> None: ...


def make_display(rank: int, stream: TextIO | None = None) -> Display:
    """The display of this process: rank 0 draws, on stderr by default; other ranks are silent."""
    stream = stream or sys.stderr
    if rank != 0 or stream is None:  # Python has no stderr if it was closed at the start
        return Display()
    return RichDisplay(stream) if can_draw(stream) else PlainDisplay(stream)


class PlainDisplay(Display):
    """Plain lines for a file or a pipe: results, messages, and progress at most every `every` seconds."""

    def __init__(
        self, stream: TextIO, every: float = PLAIN_EVERY_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._every = every
        self._now = now
        self._next = now()
        self._pace = Pace()
        self._closed = False

    def step(self, progress: Progress) -> None:
        now = self._now()
        self._pace.update(now, progress.step)
        if self._due(now):
            pieces = describe(progress, self._pace.seconds_left(now, progress.steps))
            self._write("  ".join(piece.text for piece in pieces))

    def evaluation(self, done: int, total: int) -> None:
        self._pace.pause()
        if done < total and self._due(self._now()):
            self._write(f"evaluating  {done:,}/{total:,}")

    def result(self, text: str) -> None:
        self._write(text)

    def log(self, text: str) -> None:
        self._write(text)

    def _due(self, now: float) -> bool:
        if now < self._next:
            return False
        self._next = now + self._every
        return True

    def _write(self, text: str) -> None:
        if self._closed:
            return
        try:
            # One write per line, so that lines of two threads do not mix.
            self._stream.write(message(text) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            # The reader is gone (closed pipe, lost connection). The run continues, and log.txt has every line.
            self._closed = True


class RichDisplay(Display):
    """A live bar on a terminal, redrawn a few times a second, with results and messages above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._screen = make_screen(self._console)
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

    def log(self, text: str) -> None:
        self._say(text)

    def end(self) -> None:
        self._screen.clear()

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(message(text), style=style))

    def _draw(self, width: int, ascii_only: bool) -> Text:
        progress, evaluated = self._progress or self._start, self._evaluated
        done = progress.step / max(1, progress.steps)
        if evaluated is not None:
            pieces = [Piece(_epoch(progress)), *counted_pieces("evaluating", *evaluated, None)]
            done = evaluated[0] / max(1, evaluated[1])
        elif self._progress is None:
            pieces = [Piece(_epoch(progress)), Piece(_steps(progress), 1), Piece("starting")]
        else:
            pieces = describe(progress, self._pace.seconds_left(time.monotonic(), progress.steps))
        # Each piece keeps its largest width, so that the line does not jump when numbers change.
        if len(self._widths) != len(pieces):
            self._widths = [0] * len(pieces)
        self._widths = [max(old, len(piece.text)) for old, piece in zip(self._widths, pieces, strict=True)]
        pieces = [
            Piece(piece.text.ljust(wide), piece.spare)
            for piece, wide in zip(pieces, self._widths, strict=True)
        ]
        return bar_line(pieces, done, width, ascii_only)


def describe(progress: Progress, seconds_left: float | None) -> list[Piece]:
    """The pieces of a progress line, in display order. Pure."""
    loss = "loss -" if progress.loss is None else f"loss {loss_text(progress.loss)}"
    if progress.loss is not None and progress.loss_lag_s >= LAG_SHOWN_S:
        loss += f" (step {progress.loss_step:,})"
    return [
        Piece(_epoch(progress), 1),
        Piece(_steps(progress), 5),
        Piece(loss),
        Piece(rate(progress.images_per_s, "img"), 3),
        Piece(f"data wait {percent(progress.data_share)}", 4),
        Piece(f"lr {progress.lr:.3g}", 6),
        Piece("-:-- left" if seconds_left is None else f"{duration(seconds_left)} left", 2),
    ]


def _epoch(progress: Progress) -> str:
    return f"epoch {progress.epoch:.1f}/{progress.epochs:.4g}"


def _steps(progress: Progress) -> str:
    return f"step {progress.step:,}/{progress.steps:,}"
