"""Draws docs/images/terminal.svg: runs the commands of the README's picture in tmux and saves what the screen shows.

python docs/make_terminal_picture.py        # about a minute; needs tmux and the `drumline` command on PATH
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.color import Color
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).parent / "images" / "terminal.svg"
COLUMNS, ROWS = 114, 60
RECIPE = """
data.source = "digits"
model.name = "resnet8"
train.epochs = 3
run.strict = true
checkpoint.every_steps = 5
"""
COMMANDS = (
    "drumline train digits.toml run.name=one",
    "drumline train digits.toml run.name=two",
    "drumline resume runs/two parallel.processes=2",
    "drumline compare runs/one runs/two",
)
KILLED = "two/checkpoints/step-20"
"""When this checkpoint of the second command is there, the command is killed with signal 9."""
SESSION = "drumline-picture"
CELL, LINE = 8.4, 18
"""Width of a character and height of a line, in pixels, of a 14 px monospace font."""


def main() -> None:
    """Runs the commands one after the other in a terminal of its own and draws its last screen."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "digits.toml").write_text(RECIPE)
        tmux(
            "new-session", "-d", "-s", SESSION, "-x", str(COLUMNS), "-y", str(ROWS), "-c", name, "bash --norc"
        )
        try:
            typed("PS1='\\n$ '; shopt -u checkwinsize; export COLUMNS=104; clear", folder / "ready")
            for number, command in enumerate(COMMANDS):
                typed(command, folder / f"done-{number}", folder / "runs" / KILLED if number == 1 else None)
            screen = tmux("capture-pane", "-t", SESSION, "-e", "-p")
        finally:
            tmux("kill-session", "-t", SESSION)
    # One decoder for the whole screen: tmux gives a style only where it changes, also across lines.
    lines = [line for line in AnsiDecoder().decode(screen.strip()) if "; touch " not in line.plain]
    PICTURE.write_text(svg(lines[:-1]))
    print(PICTURE)


def tmux(*argv: str) -> str:
    return subprocess.run(["tmux", *argv], check=True, capture_output=True, text=True).stdout


def typed(command: str, done: Path, killed_at: Path | None = None) -> None:
    """Types a command and waits until it has ended, or kills it as soon as `killed_at` exists."""
    tmux("send-keys", "-t", SESSION, command, "Enter")
    # A second line, typed ahead, tells when the shell is back; it is taken out of the picture.
    tmux("send-keys", "-t", SESSION, f" : ; touch {done}", "Enter")
    deadline = time.monotonic() + 180
    while not done.exists():
        if killed_at is not None and killed_at.exists():
            subprocess.run(["pkill", "-9", "-f", command], check=False)
            killed_at = None
        if time.monotonic() > deadline:
            sys.exit(f"{command}: not finished after 3 minutes")
        time.sleep(0.2)


def svg(lines: list[Text]) -> str:
    """A window with these lines."""
    width, height = round(COLUMNS * CELL) + 40, len(lines) * LINE + 64
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#1b1f24"/>',
        *(
            f'<circle cx="{20 + 18 * place}" cy="18" r="6" fill="{colour}"/>'
            for place, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
        ),
    ]
    for number, line in enumerate(lines):
        typed_line = line.plain.startswith("$ ")
        base = "#ffffff" if typed_line else "#c9d1d9"
        spans = "".join(
            f'<tspan fill="{colour_of(piece) or base}"{bold(piece, typed_line)}>{escape(piece.plain)}</tspan>'
            for piece in line.divide(sorted({*(s.start for s in line.spans), *(s.end for s in line.spans)}))
        )
        parts.append(f'<text x="20" y="{54 + number * LINE}" xml:space="preserve">{spans}</text>')
    return "\n".join([*parts, "</svg>", ""])


def colour_of(piece: Text) -> str:
    for span in piece.spans:
        colour: Color | None = getattr(span.style, "color", None)
        if colour is not None and not colour.is_default:
            return colour.get_truecolor(MONOKAI).hex
    return ""


def bold(piece: Text, typed_line: bool) -> str:
    marked = typed_line or any(getattr(span.style, "bold", False) for span in piece.spans)
    return ' font-weight="bold"' if marked else ""


if __name__ == "__main__":
    main()
