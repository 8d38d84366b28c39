"""Writes the folder map of docs/architecture.md: every module with the first sentence of its docstring.

python docs/make_architecture_map.py     # also `make docs`; a test compares the page with the tree
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "src" / "drumline", ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- map: written by docs/make_architecture_map.py -->", "<!-- end of map -->"
ORDER = [
    "core",
    "native",
    "config",
    "data",
    "models",
    "state",
    "parallel",
    "guards",
    "observe",
    "diagnosis",
    "report",
    "training",
    "distillation",
    "inference",
    "comparison",
    "launch",
    "cli",
]
"""From the lowest layer to the highest."""


def with_map(page: str) -> str:
    """The page with the map of the tree as it is."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{folder_map()}{END}{after}"


def folder_map() -> str:
    """A table for each package, lowest layer first."""
    tables = [_table(SOURCE, "drumline/", recurse=False)]
    tables += [_table(SOURCE / package, f"drumline/{package}/") for package in ORDER]
    return "\n".join(tables)


def _table(folder: Path, title: str, recurse: bool = True) -> str:
    files = sorted(folder.rglob("*.py") if recurse else folder.glob("*.py"), key=_place)
    about = _first_sentence(folder / "__init__.py")
    rows = [
        f"| `{path.relative_to(folder)}` | {_first_sentence(path)} |"
        for path in files
        if path != folder / "__init__.py" and _first_sentence(path)
    ]
    table = ["| | |", "|---|---|", *rows, ""] if rows else []
    return "\n".join([f"### `{title}`", "", about, "", *table])


def _place(path: Path) -> tuple[bool, Path]:
    """Files of a folder before the folders in it."""
    return path.parent.name != path.parts[-2], path.parent / ("" if path.name == "__init__.py" else path.name)


def _first_sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z`])", text)[0].replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(with_map(PAGE.read_text()))
