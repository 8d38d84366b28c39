"""Writes the tables of methods and of their options in docs/distillation.md, from the method classes.

python docs/make_method_table.py     # also `make docs`; a test compares the page with the classes
"""

from __future__ import annotations

from pathlib import Path

from drumline.config.fields import fields_of
from drumline.config.toml import literal
from drumline.distillation.method import Method
from drumline.distillation.methods import METHODS
from drumline.distillation.schedules import TermSchedule

PAGE = Path(__file__).with_name("distillation.md")
BEGIN, END = "<!-- methods: written by docs/make_method_table.py -->", "<!-- end of methods -->"


def with_tables(page: str) -> str:
    """The page with the tables of the methods as they are."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    methods = [
        "| method | reads | weights | compares |",
        "|---|---|---|---|",
        *map(_method, METHODS.values()),
    ]
    options = ["| option | value | default | meaning |", "|---|---|---|---|"]
    options += [row for method in METHODS.values() for row in _options(method)]
    options += _schedule_options()
    return "\n".join([before + BEGIN, *methods, "", *options, END + after])


def _method(method: type[Method]) -> str:
    reads = method.reads
    if not method.mixes:
        reads += ", labels"
    if method.scope == "global_batch":
        reads += "; relates samples"
    weights = method.weights
    numbers = {"r": weights.r} if weights.r != 1 else {}
    numbers |= {"a": weights.a} if weights.a else {"b": weights.b}
    if "T" in fields_of(method):
        numbers["T"] = weights.T
    compares = " ".join((method.__doc__ or "").split("\n\n")[0].split()).removesuffix(".")
    if method.initial_epochs:
        only = "only " if method.only_initial else ""
        compares += f"; {only}an initial phase of {method.initial_epochs:g} epochs"
    shown = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
    return f"| `{method.name}` | {reads} | {shown} | {compares} |"


def _options(method: type[Method]) -> list[str]:
    return [
        f"| `{method.name}.{name}` | {option.takes()} | `{literal(option.default)}` | {option.help} |"
        for name, option in fields_of(method).items()
        if name != "T"
    ]


def _schedule_options() -> list[str]:
    """The options that every method has; those of the temperature, every method with one."""
    own: dict[float, list[str]] = {}
    for method in METHODS.values():
        if method.warmup:
            own.setdefault(method.warmup, []).append(method.name)
    exceptions = "".join(f"; {', '.join(names)}: `{epochs}`" for epochs, names in own.items())
    return [
        f"| `METHOD.{name}` | {option.takes()} | `{literal(option.default)}`"
        f"{exceptions if name == 'warmup' else ''} | {option.help} |"
        for name, option in fields_of(TermSchedule).items()
    ]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
