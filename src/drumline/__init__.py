"""Drumline trains and distils PyTorch vision models: fast, correct, the same every time, and it says why.

The command line is `drumline`. From Python:

    Recipe, train, distill, evaluate     the commands as functions
    create_model, load_model             models by name; the model of a run, ready to predict
    export_model                         exports a verified model for other programs
    open_feed                            exact pixels at full speed, for any training loop
    guard, GuardError                    finds silent mistakes in any training loop
    clock                                says where the time of any training loop goes, and what would help
    checkpoints                          save, verify and load, for any training loop
    resize                               Pillow's resize, whatever Pillow is installed
    UserError                            an error that the user can fix

For example:

    recipe = drumline.Recipe.from_args(["data.path=photos", "model.name=resnet18"])
    run = drumline.train(recipe)["run"]
    drumline.load_model(run).predict("cat.jpg")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drumline import checkpoints as checkpoints
    from drumline.api import distill as distill
    from drumline.api import evaluate as evaluate
    from drumline.api import train as train
    from drumline.config.recipe import Recipe as Recipe
    from drumline.core.errors import UserError as UserError
    from drumline.data.feed.open import open_feed as open_feed
    from drumline.data.image.resize import resize as resize
    from drumline.diagnosis.script.clock import clock as clock
    from drumline.guards.finding import GuardError as GuardError
    from drumline.guards.script.watch import guard as guard
    from drumline.inference.export.export import export_model as export_model
    from drumline.inference.model import load_model as load_model
    from drumline.models.registry import create_model as create_model

    __version__: str

_HOMES = {
    "GuardError": "drumline.guards.finding",
    "Recipe": "drumline.config.recipe",
    "UserError": "drumline.core.errors",
    "clock": "drumline.diagnosis.script.clock",
    "create_model": "drumline.models.registry",
    "distill": "drumline.api",
    "evaluate": "drumline.api",
    "export_model": "drumline.inference.export.export",
    "guard": "drumline.guards.script.watch",
    "load_model": "drumline.inference.model",
    "open_feed": "drumline.data.feed.open",
    "resize": "drumline.data.image.resize",
    "train": "drumline.api",
}
"""The module of each public name, imported when the name is first used: `import drumline` does not import torch."""

__all__ = ["__version__", "checkpoints", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "checkpoints":
        return import_module("drumline.checkpoints")
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'drumline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    """The version in pyproject.toml: from the installed package, or from the file itself in a source tree."""
    import tomllib
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    try:
        return version("drumline")
    except PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        found: str = tomllib.loads(project.read_text())["project"]["version"]
        return found
