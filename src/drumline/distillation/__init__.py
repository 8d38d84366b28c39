"""Distillation: a student learns from labels and from a teacher, by any method, on any number of processes.

For methods of your own (docs/add-a-method.md):

    Method          the base class of every method
    Weights         the default weights that a method declares
    LossInputs      what its loss gets
    NetworkInfo     what `needs` and `helper` know of a network: names and shapes of its taps
    Needs           the taps that `needs` returns
    Range           limits of an option
    at_common_size  two maps, the larger one averaged down to the size of the smaller one
    method_named    builds a method by its name
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drumline.config.limits import Range as Range
    from drumline.distillation.method import LossInputs as LossInputs
    from drumline.distillation.method import Method as Method
    from drumline.distillation.method import Needs as Needs
    from drumline.distillation.method import NetworkInfo as NetworkInfo
    from drumline.distillation.method import Weights as Weights
    from drumline.distillation.method import at_common_size as at_common_size
    from drumline.distillation.methods import method_named as method_named

_METHOD = "drumline.distillation.method"
_HOMES = {
    **dict.fromkeys(("LossInputs", "Method", "Needs", "NetworkInfo", "Weights", "at_common_size"), _METHOD),
    "Range": "drumline.config.limits",
    "method_named": "drumline.distillation.methods",
}
"""The module of each name, imported when the name is first used: the presets do not need torch."""

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'drumline.distillation' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
