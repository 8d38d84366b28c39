"""Recipes as TOML files: read strictly, written completely.

`load_recipe` reads what `dump_recipe` writes as an equal recipe. An error names the file, the line, the field and
what to write instead; all errors of a file are reported at once. Unknown sections and keys, values of the wrong type,
and text that is not TOML or not UTF-8 are errors.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from drumline.config.fields import (
    Field,
    WrongValue,
    expected,
    from_text,
    from_toml,
    nearest,
    nearest_choice,
    recipe_fields,
    sections,
    value_of,
    with_values,
)
from drumline.config.layouts import not_offered
from drumline.config.recipe import Recipe
from drumline.core.errors import UserError, combined
from drumline.core.text import either, printable

MAX_RECIPE = 64 << 10
"""Bytes of a recipe file. With every field and remark it has some 10,000."""
MAX_LINE = 8 << 10
"""Characters of a line: the parser's time grows with the square of a key's dots."""
_DEFAULTS = Recipe()
_NO_REMARKS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, and where its file sets each field: `recipe.toml:3` by dotted name."""

    recipe: Recipe
    origins: Mapping[str, str]


def load_recipe(path: str | Path, base: Recipe = _DEFAULTS) -> LoadedRecipe:
    """Reads a recipe file. Fields that it does not set keep their value in `base`."""
    path = Path(path)
    text = _read_text(path)
    tree = _parse(path, text)
    origins = _Origins(path, text)
    values: dict[str, Any] = {}
    errors: list[UserError] = []
    for section, table in tree.items():
        if section not in sections():
            errors.append(_unknown_section(origins[section], section, table))
        elif not isinstance(table, dict):
            what = f"{origins[section]}: {section} = {_shown(table)}: {section} is a section"
            errors.append(UserError(what, f"write its fields below a line [{section}]"))
        else:
            for key, raw in table.items():
                name = f"{section}.{key}"
                try:
                    values[name] = _value(origins[name], name, raw)
                except UserError as error:
                    errors.append(error)
    if errors:
        raise combined(errors)
    return LoadedRecipe(with_values(base, values), MappingProxyType({name: origins[name] for name in values}))


def dump_recipe(recipe: Recipe, remarks: Mapping[str, str] = _NO_REMARKS, omit: Collection[str] = ()) -> str:
    """The whole recipe as TOML, fields in order, without those to `omit`. A remark, by field name, follows its field
    as a comment."""
    blocks = []
    for section in sections():
        lines = [f"[{section}]"]
        for field in recipe_fields().values():
            if field.section == section and field.name not in omit:
                line = f"{field.key} = {literal(_checked(recipe, field))}"
                remark = f"  # {printable(remarks[field.name])}" if field.name in remarks else ""
                lines.append(line + remark)
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def differing_fields(old: str, new: str) -> list[tuple[str, str, str]]:
    """The fields of two recipe texts that differ, by dotted name, with both values as text, in the order of the
    recipes. A missing field is `not set`."""
    values, others = flat_recipe(old), flat_recipe(new)
    return [
        (name, short_literal(values.get(name)), short_literal(others.get(name)))
        for name in values | others
        if values.get(name) != others.get(name)
    ]


def flat_recipe(text: str) -> dict[str, Any]:
    """The values of a recipe that a run has saved, by dotted name, without checks."""
    tree = tomllib.loads(text)
    return {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}


def short_literal(value: Any) -> str:
    """A value for a message: `3` for the number 3.0, `not set` for None."""
    return "not set" if value is None else literal(value).removesuffix(".0")


def literal(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's; only the delete character, legal raw in JSON, is not in TOML.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        return "a table"
    return repr(value) if isinstance(value, int | float) else str(value)


def _checked(recipe: Recipe, field: Field) -> Any:
    """The field's value in its own type, so that equal recipes (`lr` 1 and 1.0) give the same text."""
    value = value_of(recipe, field.name)
    try:
        return from_toml(field.hint, list(value) if isinstance(value, tuple) else value)
    except WrongValue:
        what = f"{field.name} = {value!r} cannot be written to a recipe file"
        raise UserError(what, f"give {expected(field.hint)}") from None


class _Origins(dict[str, str]):
    """`recipe.toml:3` for the section or field that line 3 names. The key of an inline table has the line of its
    section, and what no line names (a key in quotes) has only the file."""

    _NAMES = re.compile(r"\s*(?:\[+\s*(?P<section>[\w.-]+)\s*\]|(?P<key>[\w-]+(?:\s*\.\s*[\w-]+)*)\s*=)")

    def __init__(self, path: Path, text: str) -> None:
        super().__init__()
        self.path, section = path, ""
        for number, line in enumerate(text.split("\n"), start=1):
            if match := self._NAMES.match(line):
                section = match["section"] or section
                key = re.sub(r"\s", "", match["key"] or "")
                self.setdefault(".".join(filter(None, (section, key))), f"{path}:{number}")

    def __missing__(self, name: str) -> str:
        section = name.rpartition(".")[0]
        dotted = next((origin for known, origin in self.items() if known.startswith(f"{name}.")), "")
        return dotted or (self[section] if section else str(self.path))


def _read_text(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > MAX_RECIPE:
            raise UserError(f"{path}: {size:,} bytes are too many for a recipe", "give a different file")
        # "-sig": some editors on Windows put a byte order mark in front.
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 text", "save the file as UTF-8") from None
    except FileNotFoundError:
        close = get_close_matches(path.name, [near.name for near in path.parent.glob("*.toml")], n=1)
        fix = f"did you mean {path.with_name(close[0])}?" if close else "check the name and the folder"
        raise UserError(f"{path}: there is no such recipe file", fix) from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, not a recipe file", "name the .toml file in it") from None
    except OSError as error:
        what = f"{path}: cannot be read: {error.strerror}"
        raise UserError(what, "check the permissions of the file") from None


def _parse(path: Path, text: str) -> dict[str, Any]:
    for number, row in enumerate(text.split("\n"), start=1):
        if len(row) > MAX_LINE:
            raise UserError(f"{path}:{number}: {len(row):,} characters are too many for a line", "break it")
    try:
        tree = tomllib.loads(text)
        _reject_huge_numbers(tree)
        return tree
    except tomllib.TOMLDecodeError as error:
        reason, _, where = str(error).rpartition(" (at ")
        spot = re.fullmatch(r"line (\d+), column (\d+)\)", where)
        lines = text.rstrip().split("\n")
        line, column = (int(spot[1]), int(spot[2])) if spot else (len(lines), len(lines[-1]) + 1)
        shown = lines[line - 1] if line <= len(lines) else ""
        raise UserError(
            f"{path}:{line}:{column}: not valid TOML: {reason[0].lower()}{reason[1:]}: {_short(shown)}",
            "write text in quotes, true and false in lower case, lists as [1, 2], and each key and section once",
        ) from None
    except (RecursionError, ValueError) as error:
        what = f"{path}: not a recipe: {str(error).partition(';')[0]}"
        raise UserError(what, "do not trust this file; write a new one") from None


def _reject_huge_numbers(tree: Any) -> None:
    """Python reads hexadecimal numbers of any length, but does not print more than 4,300 digits."""
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and value.bit_length() > 1024:
            raise ValueError(f"a number of {value.bit_length():,} bits")


def _unknown_section(origin: str, name: str, table: Any) -> UserError:
    """The error for a name at the top level that is not a section: a wrong section, or a key outside of one."""
    if isinstance(table, dict):
        close = get_close_matches(name, sections(), n=1)
        fix = f"did you mean [{close[0]}]?" if close else f"the sections are {', '.join(sections())}"
        return UserError(f"{origin}: there is no section [{name}]", fix)
    return UserError(f"{origin}: {name} = {_shown(table)}: is not in a section", _suggestion(name))


def _value(origin: str, name: str, raw: Any) -> Any:
    """The checked value of one field."""
    field = recipe_fields().get(name)
    if field is None:
        raise UserError(f"{origin}: there is no field {name}", _suggestion(name))
    try:
        return from_toml(field.hint, raw)
    except WrongValue:
        given = f"{origin}: {name} = {_shown(raw)}"
        if problem := not_offered(name, str(raw)):
            raise UserError(f"{given}: {problem.what}", problem.fix) from None
        raise UserError(f"{given}: expected {expected(field.hint)}", _repair(field, raw)) from None


def _suggestion(name: str) -> str:
    """The section and key that an unknown key may have meant."""
    section, _, key = name.rpartition(".")
    guesses = [recipe_fields()[guess] for guess in nearest(name)]
    if not guesses:
        inside = [field.key for field in recipe_fields().values() if field.section == section]
        return f"[{section}] has {', '.join(inside)}" if inside else "docs/recipe.md lists every field"
    if all(guess.key == key for guess in guesses):
        return f"`{key}` belongs in {' or '.join(f'[{guess.section}]' for guess in guesses)}"
    if guesses[0].section == section:
        return f"did you mean {either([guess.key for guess in guesses])}?"
    return f"did you mean {either([f'{guess.key} in [{guess.section}]' for guess in guesses])}?"


def _repair(field: Field, raw: Any) -> str:
    """What to write instead of `raw`: the same value in the right type, the nearest choice, or an example."""
    if not isinstance(raw, dict | list):
        with suppress(WrongValue):
            return f"write {field.key} = {literal(from_text(field.hint, [str(raw)]))}"
    if close := nearest_choice(field.hint, str(raw)):
        return f"did you mean {literal(close)}?"
    return f"write for example {field.key} = {literal(field.example())}"


def _shown(raw: Any) -> str:
    return _short(literal(raw))


def _short(text: str) -> str:
    """Text on one line, of at most 60 characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else flat[:57] + "..."
