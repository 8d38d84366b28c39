"""The text of `--help`, from what a command declares: its usage, options and examples, and the fields of the recipe.

`drumline train --help` has examples, options and common fields first, then every field of the recipe in a line or
two; `--help SECTION` and `--help SECTION.KEY` explain them in full.
"""

from __future__ import annotations

import textwrap
from dataclasses import MISSING, dataclass
from typing import Any, get_args, get_origin

from drumline.config.arguments import flag
from drumline.config.fields import Field, choices, fields_of, recipe_fields, sections
from drumline.config.toml import short_literal
from drumline.core.errors import UserError
from drumline.core.text import did_you_mean, wrapped_lines

WIDTH = 80


@dataclass(frozen=True)
class Command:
    """What `drumline NAME --help` prints."""

    name: str
    usage: str
    """The arguments after the name, one line for each form."""
    about: str
    options: type
    """The dataclass of the command's options."""
    examples: str
    """Indented lines."""
    sections: tuple[str, ...] = ()
    """The sections of the recipe whose fields are listed."""
    common: tuple[str, ...] = ()
    """The fields that most runs set; they are listed first."""


def help_text(command: Command, topic: str = "") -> str:
    """The help of a command, or of one section or field of the recipe."""
    if topic in sections():
        return "\n".join([_title(topic), "", *_in_full(topic)])
    if topic in recipe_fields():
        return "\n".join(_field(recipe_fields()[topic]))
    if topic and not topic.startswith("-") and "=" not in topic:
        fix = did_you_mean(
            topic, [*sections(), *recipe_fields()], f"the sections are {', '.join(sections())}"
        )
        raise UserError(f"--help {topic}: there is no such section or field", fix)
    lead = "usage: "
    usage = "\n".join(
        f"{lead if not number else ' ' * len(lead)}drumline {command.name} {form}"
        for number, form in enumerate(command.usage.splitlines())
    )
    blocks = [usage, *map(_paragraph, textwrap.dedent(command.about).strip().split("\n\n"))]
    blocks.append(f"examples:\n{command.examples.strip(chr(10))}")
    options = [each for each in fields_of(command.options).values() if each.default is not MISSING]
    if options:
        rows = [
            (f"{flag(each)} {_metavar(each.hint)}".rstrip(), _summary(each, each.help, "default: "))
            for each in options
        ]
        blocks.append("options:\n" + _table(rows))
    if command.sections:
        common = [_row(recipe_fields()[name]) for name in command.common]
        blocks += [_GRAMMAR, "common fields, with their defaults:\n" + _table(common)]
        blocks += [_ALL_FIELDS.format(command=command.name), *map(_in_short, command.sections)]
    return "\n\n".join(blocks)


_GRAMMAR = """\
To set a field:
  lr = 0.2          below [optim] in RECIPE.toml
  optim.lr=0.2      on the command line, which overrides the file
  --optim.lr 0.2    the same as a flag"""

_ALL_FIELDS = """\
All fields follow. `drumline {command} --help optim` explains a section in full,
`drumline {command} --help optim.lr` a field."""


def _in_short(section: str) -> str:
    rows = [_row(each) for each in recipe_fields().values() if each.section == section]
    return f"{_title(section)}\n" + _table(rows)


def _row(each: Field) -> tuple[str, str]:
    return each.name, _summary(each, f"{each.help.partition('. ')[0].removesuffix('.')}.")


def _in_full(section: str) -> list[str]:
    own = (each for each in recipe_fields().values() if each.section == section)
    return [line for each in own for line in _field(each)]


def _field(each: Field) -> list[str]:
    head = f"{each.name}: {each.takes()}; default {_default(each)}"
    text = f"{each.help} {each.details}".rstrip()
    return [*wrapped_lines(head, WIDTH, "    "), *wrapped_lines(text, WIDTH, "  ", "  ")]


def _title(section: str) -> str:
    return "\n".join(wrapped_lines(f"[{section}] {sections()[section].__doc__}", WIDTH))


def _summary(each: Field, text: str, before: str = "") -> str:
    if each.default is False or each.default in ("", ()):
        return text
    shown = [_default(each)]
    if not (before and choices(each.hint)):  # those of an option are shown beside its flag
        shown += filter(None, [", ".join(name for name in each.choices if name != each.default)])
    return f"{text} ({before}{'; or '.join(shown)})"


def _paragraph(text: str) -> str:
    """Wraps the lines before the first indented one, and keeps the others."""
    lines = text.split("\n")
    indented = next((number for number, line in enumerate(lines) if line.startswith(" ")), len(lines))
    return "\n".join([*wrapped_lines(" ".join(lines[:indented]), WIDTH), *lines[indented:]])


def _default(each: Field) -> str:
    values = each.default if isinstance(each.default, tuple) else (each.default,)
    shown = [value if isinstance(value, str) else short_literal(value) for value in values]
    return ",".join(shown) or "none"


def _metavar(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"{_metavar(get_args(hint)[0])} ..."
    if hint is bool:
        return ""
    named = choices(hint)
    if named and int not in get_args(hint):
        return "|".join(named)
    return {int: "N", float: "X", str: "TEXT"}.get(hint, "N")


def _table(rows: list[tuple[str, str]]) -> str:
    """Two columns; a name that is too long for its column has a line of its own."""
    column = min(26, max(len(name) for name, _ in rows) + 4)
    lines = []
    for name, text in rows:
        first, *others = wrapped_lines(text, WIDTH - column)
        if len(name) + 4 > column:
            lines.append(f"  {name}")
            others, first = [first, *others], ""
        else:
            lines.append(f"  {name:<{column - 2}}{first}")
        lines += [" " * column + line for line in others]
    return "\n".join(lines)
