"""Selects the methods and weights of a recipe's `distill` section: a pure function.

Promises: numbers that the recipe leaves open come from the first method's paper; kd combines with any method by its
weight `a`. Rejects unknown methods and options with a suggestion, and weights that no method takes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, get_type_hints

from drumline.config.recipe import Distill
from drumline.core.errors import UserError
from drumline.distillation.method import Method
from drumline.distillation.methods import METHODS, STAGES


@dataclass(frozen=True)
class WeightedMethod:
    """A method with its name and its weight."""

    name: str
    method: Method
    weight: float


@dataclass(frozen=True)
class Selection:
    """What a distillation minimises, and its initial stages."""

    r: float
    methods: tuple[WeightedMethod, ...]
    """kd comes first if it has a weight."""
    T: float
    initial: tuple[tuple[str, float], ...]
    """The methods with an initial stage, and its epochs."""


def select_methods(distill: Distill) -> Selection:
    """The recipe's methods, with every number filled in."""
    names = _names(distill)
    others = [name for name in names if name != "kd"]
    first = METHODS[others[0] if others else "kd"]
    paper = first.weights
    r, a, T = paper.r, paper.a, paper.T
    if not others and distill.standardise:
        r, a, T = 0.1, 9.0, 2.0
    elif others and "kd" in names:
        a = 1.0
    r, a, T = (
        found if wanted == "auto" else wanted
        for wanted, found in ((distill.r, r), (distill.a, a), (distill.T, T))
    )
    options = _options(distill.options, names)
    built = {name: _build(name, {**options.get(name, {}), "T": T}) for name in (*names, "kd")}
    weights = _weights(distill, others)
    methods = [WeightedMethod("kd", built["kd"], a)] if a else []
    methods += [
        WeightedMethod(name, built[name], weight)
        for name, weight in zip(others, weights, strict=True)
        if weight and METHODS[name].initial != name
    ]
    if not r and not methods:
        raise UserError(
            "distill.r, distill.a and distill.b leave nothing to minimise",
            "set one of them above 0",
        )
    if distill.standardise and not any(each.method.on_logits for each in methods):
        raise UserError(
            f"distill.standardise = true: {', '.join(names)} compares no logits",
            "remove it, or add kd with distill.a",
        )
    if distill.initial_epochs != "auto" and not any(METHODS[name].initial for name in others):
        raise UserError(
            f"distill.initial_epochs = {distill.initial_epochs:g}: {', '.join(names)} has no initial stage",
            "remove it; fsp, abound and factor have an initial stage",
        )
    initial = tuple(
        (name, METHODS[name].initial_epochs if distill.initial_epochs == "auto" else distill.initial_epochs)
        for name in others
        if METHODS[name].initial
    )
    return Selection(r, tuple(methods), T, initial)


def select_initial_stage(distill: Distill, name: str) -> Selection:
    """The initial stage of a method, whose only term is that stage's loss. `b` is its weight if the method has no
    other stage."""
    options = _options(distill.options, _names(distill))[name]
    stage = METHODS[name].initial
    known = {key: value for key, value in options.items() if key in _option_fields(stage)}
    weight = STAGES[stage].weights.b
    if stage == name and distill.b:
        others = [other for other in distill.method if other != "kd"]
        weight = _weights(distill, others)[others.index(name)]
    return Selection(0.0, (WeightedMethod(name, _build(stage, known), weight),), 1.0, ())


def _names(distill: Distill) -> list[str]:
    if not distill.method:
        raise UserError("distill.method is empty", f"give one of: {', '.join(METHODS)}")
    for name in distill.method:
        if name not in METHODS:
            near = get_close_matches(name.lower(), METHODS, n=1)
            raise UserError(
                f"distill.method = {name}: unknown method",
                f"did you mean {near[0]}?" if near else f"use one of: {', '.join(METHODS)}",
            )
    if len(set(distill.method)) < len(distill.method):
        raise UserError(
            f"distill.method = {','.join(distill.method)} names a method twice", "name each method once"
        )
    return list(distill.method)


def _weights(distill: Distill, others: list[str]) -> list[float]:
    if not distill.b:
        return [METHODS[name].weights.b for name in others]
    if len(distill.b) != len(others):
        names = ", ".join(others) or "none (kd is weighted by distill.a)"
        raise UserError(
            f"distill.b = {','.join(f'{b:g}' for b in distill.b)} has {len(distill.b)} weight(s); the methods that "
            f"take one are: {names}",
            "give one weight per method, in their order",
        )
    return list(distill.b)


def _options(texts: tuple[str, ...], names: list[str]) -> dict[str, dict[str, Any]]:
    """The options of every method, parsed by the types of its fields."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in texts:
        key, _, value = text.partition(min(":=", key=lambda sign: text.find(sign) % (len(text) + 1)))
        owner, _, option = key.rpartition(".")
        owners = [name for name in names if owner in ("", name) and option in _option_fields(name)]
        if not owners:
            known = ", ".join(f"{name}.{option}" for name in names for option in _option_fields(name))
            raise UserError(
                f"distill.options: {text}: distill.method = {','.join(names)} has no option {key!r}",
                f"use one of: {known}" if known else "remove it: the method has no options",
            )
        if len(owners) > 1:
            raise UserError(
                f"distill.options: {text}: {' and '.join(owners)} both have it", f"write {owners[0]}.{text}"
            )
        kind = _option_fields(owners[0])[option]
        try:
            found[owners[0]][option] = kind(value)
        except ValueError:
            raise UserError(
                f"distill.options: {text}: {option} must be of type {kind.__name__}",
                f"for example {option}:1",
            ) from None
    return found


def _option_fields(name: str) -> dict[str, type]:
    """A method's options and their types, without the temperature, which is a field of the recipe."""
    kind = _all()[name]
    hints = get_type_hints(kind)
    own = [item.name for item in fields(kind) if item.name != "T"]  # type: ignore[arg-type]
    return {option: hints[option] for option in own}


def _build(name: str, numbers: dict[str, Any]) -> Method:
    kind = _all()[name]
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in numbers.items() if key in known})


def _all() -> dict[str, type[Method]]:
    return {**METHODS, **STAGES}
