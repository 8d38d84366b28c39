"""The code and the libraries of a process, as names and versions that ranks compare.

Promises: two processes with the same answer run the same lines of drumline, of the user's own models and sources, and
the same versions of the libraries that decode images and compute. Nothing is imported for it.
"""

from __future__ import annotations

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
    digest, files = hashlib.sha256(), [place]
    if place.is_dir():
        files = sorted(
            Path(folder, name)
            for folder, _, names in os.walk(place)
            for name in names
            if name.endswith(ENDINGS)
        )[:MOST_FILES]
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(place)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def _module_digest(module: str) -> str:
    """Of the package that a module belongs to, or of its file; it may import others of the same package."""
    top = module.partition(".")[0]
    try:
        spec = PathFinder.find_spec(top)
        if spec is None:
            return "missing"
        folders = sorted(spec.submodule_search_locations or ())
        places = [Path(folder) for folder in folders] or ([Path(spec.origin)] if spec.origin else [])
        return " ".join(map(code_digest, places))
    except (ImportError, ValueError, OSError) as error:
        return f"unreadable ({type(error).__name__})"
