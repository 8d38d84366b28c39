"""The code and the libraries of a process, as names and versions that ranks compare.

Promises: two processes with the same answer run the same lines of drumline, of the user's own models and sources, and
the same versions of the libraries that decode images and compute. Nothing is imported for it.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from drumline.arguments import names_code
from drumline.recipe import Recipe

PACKAGES = ("drumline", "torch", "numpy", "pillow", "simplejpeg")
ENDINGS = (".py", ".c", ".h")
MOST_FILES = 5000
"""Of a user's package that are read."""
OURS = Path(__file__).parents[1]


def software(recipe: Recipe) -> dict[str, str]:
    """Versions, and digests of code. Processes of one run must agree on them."""
    found = {"Python": platform.python_version()} | {name: package_version(name) for name in PACKAGES}
    named = (recipe.model.name, recipe.data.source, *recipe.distill.teacher)
    for library in ("torchvision", "timm"):
        if any(name.startswith(f"{library}/") for name in named):
            found[library] = package_version(library)
    found["drumline's source code"] = code_digest(OURS)
    for name in dict.fromkeys(filter(names_code, named)):
        found[f"the code of {name}"] = _module_digest(name.partition(":")[0])
    return found


def package_version(name: str) -> str:
    """The version that is installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


def code_digest(place: Path) -> str:
    """Start of the SHA-256 over the source files of a folder, their names included, or of a file."""
    digest = hashlib.sha256()
    for file in _sources(place):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(place)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def _sources(place: Path) -> list[Path]:
    """The source files of a folder, or the file itself."""
    if not place.is_dir():
        return [place]
    return sorted(
        Path(folder, name) for folder, _, names in os.walk(place) for name in names if name.endswith(ENDINGS)
    )[:MOST_FILES]


def _module_digest(module: str) -> str:
    """Digests of the package or file that a module belongs to, and of those beside it that it imports."""
    top = module.partition(".")[0]
    try:
        spec = PathFinder.find_spec(top)
        if spec is None:
            return "missing"
        folders = sorted(spec.submodule_search_locations or ())
        places = [Path(folder) for folder in folders] or ([Path(spec.origin)] if spec.origin else [])
        return " ".join(code_digest(place) for place in _with_neighbours(places))
    except (ImportError, ValueError, OSError) as error:
        return f"unreadable ({type(error).__name__})"


def _with_neighbours(places: list[Path]) -> list[Path]:
    """Adds the files and packages in the same folders that these import, directly or indirectly. Imports of installed
    libraries are not followed: those libraries have versions."""
    found = list(places)
    for place in found:  # grows while it is walked through
        if place.parent.name in ("site-packages", "dist-packages"):
            continue
        for name in sorted(set().union(*map(_imports, _sources(place)))):
            beside = (place.parent / name, place.parent / f"{name}.py")
            found += [path for path in beside if path not in found and _is_code(path)][:1]
    return found


def _is_code(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.glob("*.py")))


def _imports(file: Path) -> set[str]:
    """The top-level names that a file imports. A file that cannot be parsed fails with its own message
    when it is imported."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names
