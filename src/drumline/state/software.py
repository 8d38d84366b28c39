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

from drumline.config.arguments import names_code
from drumline.config.recipe import Recipe

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
    """Of the package or file that a module belongs to, and of those beside it that it imports."""
    top = module.partition(".")[0]
    try:
        spec = PathFinder.find_spec(top)
        if spec is None:
            return "missing"
        folders = sorted(spec.submodule_search_locations or ())
        places = [Path(folder) for folder in folders] or ([Path(spec.origin)] if spec.origin else [])
        roots = dict.fromkeys(place.parent for place in places)
        beside = [place for root in roots for place in _beside(root, module) if place not in places]
        return " ".join(map(code_digest, [*places, *beside]))
    except (ImportError, ValueError, OSError) as error:
        return f"unreadable ({type(error).__name__})"


def _beside(root: Path, module: str) -> list[Path]:
    """The files and packages in `root` that a module imports, directly or not. Installed libraries have versions, so
    their imports are not followed. Only files that the module leads to are parsed."""
    if root.name in ("site-packages", "dist-packages"):
        return []
    waiting, seen, tops = [module], set[Path](), set[str]()
    while waiting and len(seen) < MOST_FILES:
        parts = waiting.pop().split(".")
        for end in range(1, len(parts) + 1):  # importing a.b.c runs a, a.b and a.b.c
            file = _source(root, parts[:end])
            if file is None:
                break
            if file not in seen:
                seen.add(file)
                tops.add(parts[0])
                waiting += _imports(file, parts[:end] if file.name == "__init__.py" else parts[: end - 1])
    files = {top: Path(root, f"{top}.py") for top in sorted(tops)}
    return [file if file.is_file() else Path(root, top) for top, file in files.items()]


def _source(root: Path, parts: list[str]) -> Path | None:
    """The file of a module, or its folder if it has none."""
    base = root.joinpath(*parts)
    candidates = (Path(f"{base}.py"), base / "__init__.py")
    return next((file for file in candidates if file.is_file()), base if base.is_dir() else None)


def _imports(file: Path, package: list[str]) -> list[str]:
    """The modules that a file of a package imports, by their full names. A file that cannot be parsed fails, with its
    own message, when it is imported."""
    try:
        tree = ast.parse(file.read_bytes() if file.is_file() else b"")
    except (SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [f"{base}.{alias.name}" for alias in node.names]  # a module, or something in one
    return names
