"""Packages form layers: a module imports from lower layers and from its own package, and from nothing above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "drumline"
LAYERS = (
    ("core", "native"),
    ("config",),
    ("data", "models"),
    ("state",),
    ("parallel",),
    ("guards", "observe"),
    ("diagnosis",),
    ("report",),
    ("training",),
    ("distillation", "inference", "comparison"),
    ("launch",),
    ("cli",),
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE)


def imported(path: Path) -> Iterator[str]:
    """The packages of ours that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("drumline."))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_from_lower_layers(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0]
    above = {
        package
        for package in imported(path)
        if package in LEVEL and package != own and LEVEL[package] >= LEVEL[own]
    }
    assert not above, f"{own} is below {sorted(above)}: move what both need to a lower layer"


def test_every_package_has_a_layer() -> None:
    assert {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()} == set(LEVEL)
