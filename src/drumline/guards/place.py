"""Places in the user's own code: who called, and which line took the model out of its DDP wrapper.

Promises: frames of torch, of the standard library and of Drumline are never named; source is read, never run. Pure
but for reading source files.
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

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_STANDARD = sysconfig.get_paths()["stdlib"]
_ASSIGNED = 1


@dataclass(frozen=True)
class Place:
    """A line of source."""

    file: str
    line: int

    @property
    def text(self) -> str:
        """The line itself, without its indent; empty where the source cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        """As an editor opens it, with the line quoted."""
        quoted = f": `{self.text}`" if self.text else ""
        return f"{_short(self.file)}:{self.line}{quoted}"


def user_places(frame: FrameType | None = None) -> list[Place]:
    """The user's lines on the stack, innermost first."""
    frame = frame or sys._getframe(1)
    places = []
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            places.append(Place(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return places


def line_to_change(called: Place | None, files: Iterable[str]) -> Place | None:
    """The line that took a model out of its wrapper: an assignment `a = a.module`, else `b = a.module`; else the line
    that called around the wrapper, where it is known; else a call of `a.module(...)` or of a part of it. Saving and
    loading (`a.module.state_dict()`) is no mistake and not named."""
    found: list[tuple[int, int, Place]] = []
    for order, file in enumerate(dict.fromkeys(files)):
        try:
            tree = ast.parse("".join(linecache.getlines(file)))
        except SyntaxError:  # a notebook's cell with magic in it, say
            continue
        for node in ast.walk(tree):
            weight = _weight(node)
            if weight is not None:
                found.append((weight, order, Place(file, node.lineno)))  # type: ignore[attr-defined]
    best = min(found, key=lambda item: (item[0], item[1], item[2].line), default=None)
    if best is None or (best[0] > _ASSIGNED and called is not None):
        return called
    return best[2]


def _weight(node: ast.AST) -> int | None:
    """0 for the surest sign; None where nothing is taken out of a wrapper."""
    if isinstance(node, ast.Assign) and _is_module(node.value):
        assert isinstance(node.value, ast.Attribute)
        same = any(ast.unparse(target) == ast.unparse(node.value.value) for target in node.targets)
        return 0 if same else _ASSIGNED
    if isinstance(node, ast.Call):
        called = node.func
        if _is_module(called):
            return 2
        if isinstance(called, ast.Subscript) and _is_module(called.value):
            return 2
        quiet = (
            "state_dict",
            "load_state_dict",
            "parameters",
            "named_parameters",
            "train",
            "eval",
            "modules",
        )
        if isinstance(called, ast.Attribute) and _is_module(called.value) and called.attr not in quiet:
            return 3
    return None


def _is_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "module"


def is_users(file: str) -> bool:
    """Whether a source file is the user's, not torch's, Python's or ours."""
    if file.startswith((_OURS, _TORCH, "<")):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
