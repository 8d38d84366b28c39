"""The values that a field may hold, declared beside the field: `lr: Annotated[float, Range(0, 1e6)] = 0.1`.

A limit checks a value of the right type and says what is wrong and what to do. As text, it describes itself for
`--help` and docs/recipe.md. In a list, every value must be within the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from drumline.core.text import counted, either, near


class Wrong(NamedTuple):
    """Why a value is outside a limit, and what to do about it."""

    what: str
    fix: str


@dataclass(frozen=True)
class Range:
    """Finite numbers from `least` to `most`. `above` and `below` are bounds that are excluded themselves. `or_zero`
    also allows 0, which turns the field off. `auto` is always allowed."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    or_zero: bool = False
    hint: str = ""
    """Added to the fix."""
    example: float | None = None
    """For error messages, if the default is `auto`."""

    def check(self, value: Any) -> Wrong | None:
        wrong = (self._check(each) for each in (value if isinstance(value, tuple) else (value,)))
        return next(filter(None, wrong), None)

    def __str__(self) -> str:
        named = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        bounds = [f"{name} {_number(bound)}" for name, bound in named.items() if math.isfinite(bound)]
        return ("0, or " if self.or_zero else "") + ", ".join(bounds)

    def _check(self, value: float | str) -> Wrong | None:
        if isinstance(value, str) or (self.or_zero and value == 0):
            return None
        if not math.isfinite(value):
            return Wrong("not finite", "give a finite number")
        if value < self.least:
            what, fix = "too small", f"give at least {_number(self.least)}"
        elif value <= self.above:
            what, fix = "too small", f"give more than {_number(self.above)}"
        elif value > self.most:
            what, fix = "too large", f"give at most {_number(self.most)}"
        elif value >= self.below:
            what, fix = "too large", f"give less than {_number(self.below)}"
        else:
            return None
        fix += ", or 0 to turn it off" if self.or_zero else ""
        return Wrong(what, f"{fix}; {self.hint}" if self.hint else fix)


@dataclass(frozen=True)
class Length:
    """Lists of these lengths, or empty ones."""

    lengths: tuple[int, ...]
    hint: str

    def check(self, value: tuple[Any, ...]) -> Wrong | None:
        if not value or len(value) in self.lengths:
            return None
        return Wrong(f"has {counted(len(value), 'value')}", f"give {self.hint}")

    def __str__(self) -> str:
        return f"{either([str(length) for length in self.lengths])} values"


@dataclass(frozen=True)
class Values:
    """Lists of one value for each name, within the limits of the name, or empty ones."""

    ranges: Mapping[str, Range]
    example: tuple[float, ...]

    def check(self, value: tuple[float, ...]) -> Wrong | None:
        if not value:
            return None
        shown = ",".join(f"{number:g}" for number in self.example)
        if len(value) != len(self.ranges):
            fix = f"give {len(self.ranges)}: {', '.join(self.ranges)}, such as {shown}"
            return Wrong(f"has {counted(len(value), 'value')}", fix)
        for (name, limit), number in zip(self.ranges.items(), value, strict=True):
            if wrong := limit.check(number):
                return Wrong(f"{name} is {wrong.what}", f"{wrong.fix} as {name}, such as {shown}")
        return None

    def __str__(self) -> str:
        return ", ".join(f"{name} {limit}" for name, limit in self.ranges.items())


class ClassWeights:
    """`none`, `balanced`, or NAME:WEIGHT for some classes."""

    example = ("cat:2", "dog:0.5")

    def check(self, value: tuple[str, ...]) -> Wrong | None:
        if value in ((), ("none",), ("balanced",)):
            return None
        fix = "give none, balanced, or NAME:WEIGHT,NAME:WEIGHT,..., such as cat:2,dog:0.5"
        for text in value:
            name, _, number = text.rpartition(":")
            try:
                sound = bool(name) and math.isfinite(float(number)) and float(number) >= 0
            except ValueError:
                sound = False
            if not sound:
                return Wrong(f"{text!r} is not a class with a weight of at least 0", fix)
        if len(named_weights(value)) < len(value):
            return Wrong("names a class twice", "give each class one weight")
        return None

    def __str__(self) -> str:
        return "none, balanced, or NAME:WEIGHT for some classes"


def named_weights(value: tuple[str, ...]) -> dict[str, float]:
    """The weights by class name, from a checked list of NAME:WEIGHT."""
    parts = [text.rpartition(":") for text in value]
    return {name: float(number) for name, _, number in parts}


@dataclass(frozen=True)
class Names:
    """One of these names, or the user's own code as `package.module:thing`. `details` explains the names; `others`
    are code that a library has, to suggest."""

    names: tuple[str, ...]
    thing: str = "factory"
    details: str = ""
    others: tuple[str, ...] = ()

    def check(self, value: str) -> Wrong | None:
        module, colon, attribute = value.partition(":")
        if colon and "/" in value:
            return Wrong(
                "has a slash", f"give {self.example}, and put the folder of the package on PYTHONPATH"
            )
        if value in (self.names or ("",)) or (colon and module and attribute):
            return None
        path, dot, last = value.rpartition(".")
        if dot and path and last and not colon and "/" not in value:
            return Wrong("has no colon", f"did you mean {path}:{last}?")
        if not self.names:
            return Wrong("not the name of a function", f"give {self}")
        meant = near(value, self.names)
        meant += [other for other in self.others if other.lower().endswith(f":{value.lower()}")]
        return Wrong(f"unknown; did you mean {either(meant)}?" if meant else "unknown", f"use one of {self}")

    @property
    def example(self) -> str:
        return f"package.module:{self.thing}"

    def __str__(self) -> str:
        return f"{', '.join(self.names)}, or {self.example}" if self.names else self.example


@dataclass(frozen=True)
class Several:
    """Some of these names, or `none`."""

    names: tuple[str, ...]

    def check(self, value: tuple[str, ...]) -> Wrong | None:
        known = (*self.names, "none")
        for name in value:
            if name not in known:
                meant = near(name, known)
                what = f"{name!r} is unknown{f'; did you mean {meant[0]}?' if meant else ''}"
                return Wrong(what, f"give {self}")
        if len(set(value)) < len(value) or (len(value) > 1 and "none" in value):
            return Wrong("names one twice, or combines none with others", f"give {self}")
        return None

    def __str__(self) -> str:
        return f"some of {', '.join(self.names)}; or none"


@dataclass(frozen=True)
class Arguments:
    """A list of keyword arguments, each `key:value`. `fields`: arguments that are not allowed because they have a
    recipe field."""

    fields: Mapping[str, str]
    example = ("key:value",)

    def check(self, value: tuple[str, ...]) -> Wrong | None:
        seen = set[str]()
        for text in value:
            key, sign, given = _key_and_value(text)
            if not (sign and key.isidentifier() and given):
                return Wrong(
                    f"{text!r} is not an argument", "write key:value, or several as key:value,key:value"
                )
            if key in self.fields:
                return Wrong(f"{key} has its own recipe field", f"set {self.fields[key]} instead")
            if key in seen:
                return Wrong(f"{key} is given twice", "give each argument once")
            seen.add(key)
        return None

    def __str__(self) -> str:
        return "each key:value"


MODEL_ARGUMENTS = Arguments(
    {"name": "model.name", "classes": "model.classes", "num_classes": "model.classes"}
)
OPTIMIZER_ARGUMENTS = Arguments(
    {"params": "train.freeze", "lr": "optim.lr", "weight_decay": "optim.weight_decay"}
)


def keyword_arguments(texts: Iterable[str]) -> dict[str, bool | int | float | str | None]:
    """The arguments that `key:value` texts stand for. A value is none, true, false, a number, or text."""
    words = {"none": None, "true": True, "false": False}
    found: dict[str, bool | int | float | str | None] = {}
    for key, _, text in map(_key_and_value, texts):
        found[key] = words.get(text.lower(), text)
        for kind in (float, int):  # int takes precedence
            with suppress(ValueError):
                found[key] = kind(text)
    return found


def _key_and_value(text: str) -> tuple[str, str, str]:
    """Split at the first `:` or `=`."""
    return text.partition(min(":=", key=lambda sign: text.find(sign) % (len(text) + 1)))


@dataclass(frozen=True)
class PerMachine:
    """Marks a field that may differ between the machines of a run. It limits nothing."""

    path: bool = False
    """Whether the field is the path of a file or folder, or a list of paths."""


@dataclass(frozen=True)
class Descriptions:
    """What each choice of a field means. Allows every value."""

    texts: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.texts)

    @property
    def details(self) -> str:
        return " ".join(f"`{name}`: {text}." for name, text in self.texts.items())

    def check(self, value: Any) -> None:
        return None

    def __str__(self) -> str:
        return ""


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:.15g}"
