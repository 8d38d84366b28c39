"""The table of distillation methods by name, one module per family; and the user's own as `package.module:Class`."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from drumline.config.aliases import METHOD_ALIASES, method_name
from drumline.config.sources import names_code
from drumline.core.errors import UserError
from drumline.core.text import did_you_mean
from drumline.distillation.method import Method, options_of
from drumline.distillation.methods import (
    boundary,
    contrast,
    factor,
    logits,
    maps,
    relations,
    statistics,
    temperatures,
)
from drumline.distillation.own_method import load_method

_METHODS: tuple[type[Method], ...] = (
    logits.Kd,
    logits.Deit,
    logits.Dkd,
    logits.Dist,
    temperatures.Mlkd,
    temperatures.Ctkd,
    maps.Hint,
    maps.Attention,
    relations.Similarity,
    relations.Correlation,
    maps.Vid,
    relations.Rkd,
    relations.Pkt,
    contrast.Crd,
    maps.ReviewKd,
    boundary.Ofd,
    factor.Factor,
    statistics.Nst,
    statistics.Kdsvd,
    statistics.Fsp,
    boundary.Abound,
    relations.Srd,
)

METHODS: dict[str, type[Method]] = {method.name: method for method in _METHODS}


def method_class(name: str) -> type[Method]:
    """The class of a method, by its name, an alias, or `package.module:Class` for the user's own."""
    if names_code(name):
        return load_method(name, METHODS)
    name = method_name(name)
    if name not in METHODS:
        module, dot, last = name.rpartition(".")
        spelled = map(method_name, get_close_matches(name, (*METHODS, *METHOD_ALIASES), n=1))
        near = [f"{module}:{last}"] if dot else [*spelled]
        known = f"use one of: {', '.join(METHODS)}, or your own as package.module:Class"
        raise UserError(
            f"distill.method = {name}: unknown method", f"did you mean {near[0]}?" if near else known
        )
    return METHODS[name]


def method_named(name: str, **options: Any) -> Method:
    """Builds a method by its name, an alias, or `package.module:Class`. Options that are not given have the values of
    the paper.

        kd = drumline.distillation.method_named("kd", T=2.0)

    Raises `UserError` for an unknown name, an unknown option, or a value outside its limits.
    """
    kind = method_class(name)
    if unknown := [option for option in options if option not in options_of(kind)]:
        raise UserError(
            f"{name} has no option {unknown[0]!r}",
            did_you_mean(
                unknown[0], options_of(kind), f"its options are: {', '.join(options_of(kind)) or 'none'}"
            ),
        )
    return kind(**options)
