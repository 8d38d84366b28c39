"""Lines of the user's own code: the one that made a call, and the one that took the model out of its DDP wrapper.

Promises: names no line of torch, the standard library or Drumline. Reads source, never runs it.
"""

from __future__ import annotations

import ast
import linecache
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_DRUMLINE = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_STANDARD = sysconfig.get_paths()["stdlib"]
_ASSIGNED = 1
_HARMLESS = ("state_dict", "load_state_dict", "parameters", "named_parameters", "train", "eval", "modules")
"""Methods of `model.module` that a script may call."""


@dataclass(frozen=True)
class SourceLine:
    """A line of source."""

    file: str
    line: int

    @property
    def text(self) -> str:
        """The line itself, without its indent; empty if the source cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        """As an editor opens it, with the line quoted."""
        quoted = f": `{self.text}`" if self.text else ""
        return f"{_short(self.file)}:{self.line}{quoted}"


def user_lines(frame: FrameType | None = None) -> list[SourceLine]:
    """The user's lines on the stack, innermost first."""
    frame = frame or sys._getframe(1)
    lines = []
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            lines.append(SourceLine(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return lines


def user_line() -> str:
    """The user's innermost line on the stack, as text; empty if there is none."""
    lines = user_lines(sys._getframe(1))
    return str(lines[0]) if lines else ""


def line_to_change(called: SourceLine | None, files: Iterable[str]) -> SourceLine | None:
    """The line that took a model out of its wrapper: an assignment `a = a.module`, else `b = a.module`; else the line
    that called around the wrapper, if it is known; else a call of `a.module(...)` or of a method of it. Saving and
    loading (`a.module.state_dict()`) is no mistake and is not named."""
    found: list[tuple[int, int, SourceLine]] = []
    for order, file in enumerate(dict.fromkeys(files)):
        try:
            tree = ast.parse("".join(linecache.getlines(file)))
        except SyntaxError:  # for example a notebook cell with a magic command
            continue
        for node in ast.walk(tree):
            weight = _weight(node)
            if weight is not None:
                found.append((weight, order, SourceLine(file, node.lineno)))  # type: ignore[attr-defined]
    best = min(found, key=lambda item: (item[0], item[1], item[2].line), default=None)
    if best is None or (best[0] > _ASSIGNED and called is not None):
        return called
    return best[2]


def _weight(node: ast.AST) -> int | None:
    """0 for the strongest evidence; None if nothing is taken out of a wrapper."""
    if isinstance(node, ast.Assign) and _is_module(node.value):
        assert isinstance(node.value, ast.Attribute)
        same = any(ast.unparse(target) == ast.unparse(node.value.value) for target in node.targets)
        return 0 if same else _ASSIGNED
    if isinstance(node, ast.Call):
        called = node.func
        if _is_module(called) or (isinstance(called, ast.Subscript) and _is_module(called.value)):
            return 2
        if isinstance(called, ast.Attribute) and _is_module(called.value) and called.attr not in _HARMLESS:
            return 3
    return None


def _is_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "module"


def is_user_file(file: str) -> bool:
    """Whether a source file is the user's, not torch's, Python's or Drumline's."""
    if file.startswith((_DRUMLINE, _TORCH, "<")):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
