"""Drumline trains PyTorch vision models: fast, right, the same every time, and it tells you why.

The command line is `drumline`; from Python, `create_model` builds any model by name, `resize` gives Pillow's pixels
whatever Pillow is installed, and `guard` watches a training loop of one's own for silent mistakes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from drumline.data.feed.open import open_feed
    from drumline.data.image.resize import resize
    from drumline.guards.finding import GuardError
    from drumline.guards.script.watch import guard
    from drumline.models import create_model

__all__ = ["GuardError", "__version__", "create_model", "guard", "open_feed", "resize"]


def __getattr__(name: str) -> Any:
    """Imports torch only when something that needs it is asked for: `drumline --help` stays quick."""
    if name == "__version__":
        return _version()
    if name == "create_model":
        from drumline.models import create_model

        return create_model
    if name == "guard":
        from drumline.guards.script.watch import guard

        return guard
    if name == "GuardError":
        from drumline.guards.finding import GuardError

        return GuardError
    if name == "open_feed":
        from drumline.data.feed.open import open_feed

        return open_feed
    if name == "resize":
        from drumline.data.image.resize import resize

        return resize
    raise AttributeError(f"module 'drumline' has no attribute {name!r}")


def _version() -> str:
    """That of pyproject.toml: from the installed package, or from the file itself in a folder of sources."""
    import tomllib
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    try:
        return version("drumline")
    except PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        found: str = tomllib.loads(project.read_text())["project"]["version"]
        return found
