"""One process draws, on stderr, within the width of the terminal, and leaves the terminal clean."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from drumline.core import progress as progress_module
from drumline.core.progress import Piece, bar_line, progress
from drumline.observe.display import (
    Display,
    PlainDisplay,
    Progress,
    RichDisplay,
    describe,
    make_display,
)

SMALL = Progress(1.25, 10, 1_234, 9_876, 2.34567, 1_234.4, 0.0031, 0.1)
LARGE = Progress(123.4, 1200.5, 12_345_678, 123_456_789, 1.5e-7, 123_456, 0.97, 0.000123)


class Terminal(io.StringIO):
    """Takes text as a terminal of a given width would."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def _drawn(terminal: Terminal) -> str:
    """What was written, without colours; a return to the line's beginning counts as a new line."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()).replace("\r", "\n")


def test_rank_0_draws_a_bar_on_a_terminal_and_plain_lines_elsewhere(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(make_display(0, terminal), RichDisplay)
    assert type(make_display(1, terminal)) is Display
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(make_display(0, io.StringIO()), PlainDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(0, terminal), PlainDisplay)


def test_a_silent_display_takes_every_call_and_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    display = make_display(3)
    display.begin(10, 0, 1)
    display.step(SMALL)
    display.evaluation(1, 2)
    display.result("result")
    display.log("note")
    display.end()
    assert capfd.readouterr() == ("", "")


def test_progress_is_written_for_people() -> None:
    assert "  ".join(part.text for part in describe(SMALL, 5025)) == (
        "epoch 1.2/10  step 1,234/9,876  loss 2.3457  1,234 img/s  data wait 0.3 %  lr 0.1  1:23:45 left"
    )
    unknown = [part.text for part in describe(replace(SMALL, loss=None, loss_lag_s=60), None)]
    assert unknown[2] == "loss -"
    assert unknown[-1] == "-:-- left"


def test_an_old_loss_is_shown_with_its_step() -> None:
    texts = [
        describe(replace(SMALL, loss_step=1_200, loss_lag_s=seconds), None)[2].text for seconds in (1, 10)
    ]
    assert texts == ["loss 2.3457", "loss 2.3457 (step 1,200)"]


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("where", [SMALL, LARGE])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_bar_is_one_line_at_any_width_and_no_part_is_cut(
    width: int, where: Progress, ascii_only: bool
) -> None:
    parts = describe(where, 100_000)
    line = bar_line(parts, 0.3, width, ascii_only).plain
    assert len(line) <= width - 3
    assert parts[2].text in line, "the loss comes before all else"
    assert set(re.sub("  [━─#-]{6,}", "", line).split("  ")) <= {part.text for part in parts}
    if ascii_only:
        assert line.isascii()


def test_what_matters_most_stays_on_a_narrow_terminal() -> None:
    parts = describe(SMALL, 5025)
    shown = {
        width: [part.text.split()[0] for part in parts if part.text in bar_line(parts, 0.1, width).plain]
        for width in (120, 80, 45, 20)
    }
    assert shown[120] == ["epoch", "step", "loss", "1,234", "data", "lr", "1:23:45"]
    assert shown[80] == ["epoch", "loss", "1,234", "data", "1:23:45"]
    assert shown[45] == ["epoch", "loss", "1:23:45"]
    assert shown[20] == ["loss"]


def test_the_bar_shows_the_share_done_even_without_colour() -> None:
    for done, filled in [(0.0, 0), (0.5, 20), (1.0, 40), (1.7, 40)]:
        line = bar_line([Piece("a"), Piece("b")], done, 120)
        assert line.plain.count("━") == filled
        assert line.plain.count("─") == 40 - filled


def test_plain_lines_come_at_most_every_5_seconds_without_control_characters() -> None:
    stream, now = io.StringIO(), 100.0
    display = PlainDisplay(stream, now=lambda: now)
    display.begin(9_876, 0, 10)
    for tick in range(200):
        now = 100.0 + tick / 10
        display.step(replace(SMALL, step=1_000 + tick))
    display.evaluation(500, 1000)
    now += 5
    display.evaluation(600, 1000)
    display.evaluation(1000, 1000)
    display.log("a note")
    display.result("epoch 1: 91.2 %")
    display.end()
    lines = stream.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("epoch 1.2/10  step 1,")]
    assert len(steps) == 4
    assert steps[1].endswith("lr 0.1  14:43 left"), steps[1]
    assert lines[4:] == ["evaluating  600/1,000", "a note", "epoch 1: 91.2 %"]
    assert re.fullmatch(r"[\n -~]*", stream.getvalue())


def test_a_terminal_shows_bar_evaluation_notes_and_results(terminal: Terminal) -> None:
    display = make_display(0, terminal)
    display.log("before")
    display.begin(9_876, 100, 10)
    assert "epoch 0.1/10  " in _drawn(terminal)
    assert "step 100/9,876  starting" in _drawn(terminal)
    display.step(SMALL)
    display.evaluation(2_000, 10_000)
    assert isinstance(display, RichDisplay)
    assert display._screen._live is not None
    display._screen._live.refresh()
    display.evaluation(10_000, 10_000)
    display.log("[bold]kept as it is[/bold]")
    display.result("epoch 1: 91.2 %")
    display.end()
    drawn = _drawn(terminal)
    assert drawn.startswith("before\n")
    for text in ["loss 2.3457", "evaluating  ", "2,000/10,000", "[bold]kept as it is[/bold]\n", "91.2 %\n"]:
        assert text in drawn
    assert "evaluating" not in drawn[drawn.rindex("epoch 1.2/10") :]
    rest = terminal.getvalue()[terminal.getvalue().rindex("data wait") :]
    assert "\x1b[1A\x1b[2K" in rest, "the bar is gone at the end"
    assert max(len(line) for line in drawn.splitlines()) <= 80
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l"), "cursor is back"


def test_drawing_again_waits_for_the_refresh_so_a_step_costs_little(terminal: Terminal) -> None:
    display = make_display(0, terminal)
    display.begin(9_876, 0, 10)
    try:
        began = time.perf_counter()
        for _ in range(2000):
            display.step(SMALL)
        assert (time.perf_counter() - began) / 2000 < 50e-6, "measured: 0.5 us"
    finally:
        display.end()


def test_the_line_does_not_dance_when_a_number_gets_shorter(terminal: Terminal) -> None:
    display = RichDisplay(terminal)
    display.step(replace(SMALL, images_per_s=10_000))
    wide = display._draw(140, False)
    display.step(replace(SMALL, images_per_s=9_999))
    narrow = display._draw(140, False)
    assert narrow.plain.index("data wait") == wide.plain.index("data wait")


def test_ctrl_c_leaves_a_clean_terminal_and_stdout_untouched() -> None:
    program = (
        "import time\n"
        "from drumline.observe.display import Progress, make_display\n"
        "display = make_display(0)\n"
        "display.begin(100, 0, 1)\n"
        "display.step(Progress(0.5, 1, 50, 100, 1.0, 10.0, 0.1, 0.1))\n"
        "try:\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    print('{}')\n"
    )  # never calls end()
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""
    while b"loss 1.0000" not in seen:
        seen += os.read(ours, 4096)
    child.send_signal(signal.SIGINT)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.read() == b"{}\n"
    assert child.wait() == 0
    seen += os.read(ours, 65536)
    os.close(ours)
    assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h") == 1
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"loss 1.0000")
    assert seen.endswith(b"\x1b[2K"), "the bar is erased"
    assert b"Traceback" not in seen


def test_items_pass_through_progress_with_a_plain_line_every_5_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now))
    stream, seen = io.StringIO(), []
    for item in progress(range(1_200), "hashing", stream=stream):
        seen.append(item)
        now += 0.01
    assert seen == list(range(1_200))
    assert stream.getvalue().splitlines() == [
        "hashing  501/1,200  0:07 left",
        "hashing  1,002/1,200  0:02 left",
    ]


def test_progress_without_a_length_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now))
    stream = io.StringIO()
    for _ in progress(iter("abc"), "reading", stream=stream):
        now += 4.0
    assert stream.getvalue() == "reading  2\n"


def test_progress_draws_on_a_terminal_only_after_a_second_and_clears_it(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "_REDRAWS_PER_S", 50)
    began = time.monotonic()
    for _ in progress(range(20), "hashing", stream=terminal):
        if time.monotonic() - began < 0.9:
            assert "hashing" not in terminal.getvalue()
        time.sleep(0.06)
    assert re.search(r"hashing  [━─]+  \d+/20  0:00 left", _drawn(terminal))
    assert terminal.getvalue().rindex("\x1b[2K") > terminal.getvalue().rindex("hashing"), "line erased"
    assert terminal.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in terminal.getvalue()[-40:]


def test_leaving_a_progress_early_gives_the_terminal_back(terminal: Terminal) -> None:
    for _ in progress(range(20), "hashing", stream=terminal):
        break
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1
