"""The user's own distillation method: `distill.method=package.module:Class`, a class derived from `Method`.

Promises: a mistake in the class is a `UserError` before a run starts; an error that its code raises later names the
file and the line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from torch import Tensor, nn

from drumline.config.fields import fields_of
from drumline.core.errors import UserError
from drumline.core.named import accepts, line_of, load_named
from drumline.core.text import counted
from drumline.distillation.method import Method, Scope, Weights, options_of
from drumline.distillation.schedules import TermSchedule

BASE = "drumline.distillation.Method"
PAGE = "docs/add-a-method.md"
DECLARED: Mapping[str, type | tuple[type, ...]] = {
    "name": str,
    "reads": str,
    "weights": Weights,
    "least_samples": int,
    "warmup": (int, float),
    "initial_epochs": (int, float),
}
"""The attributes that a class may declare besides its options, with their types."""


def load_method(name: str, built_in: Mapping[str, type[Method]]) -> type[Method]:
    """The class that `package.module:Class` names."""
    title = f"distill.method = {name}"
    found: Any = load_named(name, "distill.method", f"({BASE})")
    attribute = name.partition(":")[2]
    if not (isinstance(found, type) and issubclass(found, Method)) or found is Method:
        what = "a class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise UserError(
            f"{title}: {attribute} is {what} that is not derived from {BASE}",
            f"write `class {attribute}(Method):` after `from drumline.distillation import Method` ({PAGE})",
        )
    _check_declarations(title, found)
    _check_options(title, found)
    if found.loss is Method.loss:
        raise UserError(
            f"{title}: has no loss", "define `def loss(self, inputs)`, which returns one loss per sample"
        )
    if not accepts(found.loss, "self", "inputs"):
        raise UserError(f"{title}: its loss cannot be called with inputs", "define `def loss(self, inputs)`")
    known = built_in.get(found.name)
    if known is not None and known is not found:
        raise UserError(
            f"{title}: its name {found.name} is that of a built-in method",
            f'give it a different one, such as `name = "{attribute.lower()}2"`',
        )
    if (
        not found.name.isidentifier()
        or hasattr(nn.ModuleDict, found.name)
        or found.name in ("ce", "training")
    ):
        raise UserError(
            f"{title}: cannot have the name {found.name!r}", "use letters, digits and _, as in a Python class"
        )
    with own_code(found, "constructing it"):
        try:
            found()
        except UserError as error:
            raise UserError(f"{title}: a default is outside its limits: {error.what}", error.fix) from error
    return found


def is_own(kind: type[Method]) -> bool:
    """Whether a class is the user's own code."""
    return not kind.__module__.startswith("drumline.")


def title_of(method: Method) -> str:
    """The beginning of messages about a method."""
    kind = type(method)
    return (
        f"distill.method = {kind.__module__}:{kind.__qualname__}"
        if is_own(kind)
        else f"distill.method = {kind.name}"
    )


@contextmanager
def own_code(kind: type[Method], doing: str) -> Iterator[None]:
    """Reports an error that the user's code raises with its file and line. Those of our own methods pass through."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a user's method may raise anything
        if not is_own(kind):
            raise
        raise UserError(
            f"distill.method = {kind.__module__}:{kind.__qualname__}: {doing} raised {type(error).__name__}"
            f"{line_of(error)}: {error}",
            f"correct it; {PAGE} describes the arguments and results of each function",
        ) from error


def check_loss(method: Method, loss: object, samples: int) -> Tensor:
    """The loss itself. Rejects anything but one loss per sample or, for scope `global_batch`, one number."""
    shape = (samples,) if method.scope == "sample" else ()
    if isinstance(loss, Tensor) and loss.shape == shape and loss.is_floating_point():
        return loss
    found = (
        f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    )
    if isinstance(loss, Tensor) and loss.shape == shape:
        found = f"a tensor of type {loss.dtype}"
    if method.scope == "sample":
        fix = (
            f"return one loss per sample, here of shape ({samples},), such as `.mean(1)` instead of `.mean()`; for a "
            'method that relates samples, declare `scope = "global_batch"` and return one number'
        )
    else:
        fix = 'return one number for the batch, such as `.mean()`, or remove `scope = "global_batch"`'
    raise UserError(f"{title_of(method)}: its loss returned {found} for {counted(samples, 'sample')}", fix)


def _check_declarations(title: str, kind: type[Method]) -> None:
    """What the class declares has the types of the base class."""
    for name, types in DECLARED.items():
        if not isinstance(value := getattr(kind, name), types):
            example = f"Weights(b={value:g})" if name == "weights" and isinstance(value, int | float) else ""
            wanted = types.__name__ if isinstance(types, type) else "number"
            raise UserError(
                f"{title}: {name} = {value!r} is not a {wanted}",
                f"write `{name} = {example}`" if example else f"give a {wanted}",
            )
    if kind.scope not in get_args(Scope):
        raise UserError(f"{title}: scope = {kind.scope!r}", f"use one of {', '.join(get_args(Scope))}")
    if kind.needs is not Method.needs and kind.reads == Method.reads:
        raise UserError(
            f"{title}: overrides needs, but not reads",
            'describe what it reads, for example `reads = "two stages"`',
        )


def _check_options(title: str, kind: type[Method]) -> None:
    """Annotated names are options: fields of a dataclass with a type that text can give, and a default."""
    try:
        hints = get_type_hints(kind)
    except Exception as error:
        raise UserError(
            f"{title}: the type of an option cannot be resolved: {error}",
            "import the types at the top of the module",
        ) from error
    of_base = get_type_hints(Method)
    options = [
        name for name, hint in hints.items() if get_origin(hint) is not ClassVar and hint is not ClassVar
    ]
    if wrong := [name for name in options if name in of_base]:
        raise UserError(
            f"{title}: {wrong[0]} has a type, which makes it an option",
            f"write `{wrong[0]} = ...` without a type",
        )
    if missing := [name for name in options if name not in options_of(kind)]:
        raise UserError(
            f"{title}: {', '.join(missing)} cannot be set, because {kind.__name__} is not a dataclass",
            f"write @dataclass(frozen=True) above `class {kind.__name__}`",
        )
    for name, option in options_of(kind).items():
        if get_origin(option.hint) is not Literal and option.hint not in (bool, int, float, str):
            raise UserError(
                f"{title}: the type of the option {name} cannot be set on the command line",
                "use int, float, bool, str or a Literal of strings",
            )
        if option.default is MISSING:
            raise UserError(f"{title}: the option {name} has no default", f"write `{name}: ... = VALUE`")
        if name in fields_of(TermSchedule):
            raise UserError(f"{title}: every method has an option {name}", "give yours a different name")
