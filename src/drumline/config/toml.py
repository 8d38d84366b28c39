"""Recipes as TOML files: read strictly, written completely.

Promises: what `dump_recipe` writes, `load_recipe` reads back as the equal recipe; every complaint names the
file, the line, the field and what to write instead, all complaints of a file at once.
Refuses unknown sections and keys, values of another type, and text that is not TOML or not UTF-8.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from drumline.config.fields import (
    RecipeField,
    WrongValue,
    example,
    expected,
    from_toml,
    from_words,
    nearest,
    nearest_choice,
    recipe_fields,
    sections,
    with_values,
)
from drumline.config.layouts import not_offered
from drumline.config.recipe import Recipe, value_of
from drumline.config.toml_places import Place, key_places
from drumline.core.errors import UserError
from drumline.core.text import either, printable

MAX_RECIPE = 64 << 10
"""Bytes of a recipe file; with every field and remark it has some 10,000."""
MAX_LINE = 8 << 10
"""Characters of a line: the parser's time grows with the square of a key's dots."""
_DEFAULTS = Recipe()
_NO_REMARKS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe read from `path`, and the line of each field that the file sets (dotted name to line)."""

    recipe: Recipe
    lines: Mapping[str, int]
    path: Path


def load_recipe(path: str | Path, base: Recipe = _DEFAULTS) -> LoadedRecipe:
    """Read a recipe file; what it does not set keeps its value in `base`."""
    path = Path(path)
    text = _read_text(path)
    tree = _parse(path, text)
    places = key_places(text)
    values: dict[str, Any] = {}
    mistakes: list[UserError] = []
    for section, table in tree.items():
        place = places[(section,)]
        if section not in sections():
            mistakes.append(_unknown_section(path, place, section, table))
        elif not isinstance(table, dict):
            mistakes.append(
                UserError(
                    f"{path}:{place.line}: {section} = {_short(place.written)}: {section} is a section",
                    fix=f"write its fields below a line [{section}]",
                )
            )
        else:
            for key, raw in table.items():
                name = f"{section}.{key}"
                try:
                    values[name] = _value(path, places[section, key], name, raw)
                except UserError as mistake:
                    mistakes.append(mistake)
    if mistakes:
        raise together(mistakes)
    lines = {name: places[tuple(name.split("."))].line for name in values}
    return LoadedRecipe(with_values(base, values), MappingProxyType(lines), path)


def dump_recipe(recipe: Recipe, remarks: Mapping[str, str] = _NO_REMARKS) -> str:
    """The whole recipe as TOML, fields in order. A remark, by field name, follows its field as a comment."""
    blocks = []
    for section in sections():
        lines = [f"[{section}]"]
        for field in recipe_fields().values():
            if field.section == section:
                line = f"{field.key} = {literal(_checked(recipe, field))}"
                lines.append(
                    line + (f"  # {printable(remarks[field.name])}" if field.name in remarks else "")
                )
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def differing_fields(old: str, new: str) -> list[tuple[str, Any, Any]]:
    """The fields of two recipe texts that differ, by dotted name, with both values; None for one that is not
    there. In the order of the texts."""
    values, others = _flat(tomllib.loads(old)), _flat(tomllib.loads(new))
    return [
        (name, values.get(name), others.get(name))
        for name in values | others
        if values.get(name) != others.get(name)
    ]


def literal(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's; only the delete character, legal raw in JSON, is not in TOML.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(literal, value))}]"
    assert isinstance(value, int | float), value
    return repr(value)


def together(mistakes: Sequence[UserError]) -> UserError:
    """Several mistakes as one error, each with its own fix."""
    return mistakes[0] if len(mistakes) == 1 else UserError("\n".join(map(str, mistakes)))


def _flat(sections: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def _checked(recipe: Recipe, field: RecipeField) -> Any:
    """The field's value in its own type, so that equal recipes (`lr` 1 and 1.0) give the same text."""
    value = value_of(recipe, field.name)
    try:
        return from_toml(field.hint, list(value) if isinstance(value, tuple) else value)
    except WrongValue:
        what = f"{field.name} = {value!r} cannot be written to a recipe file"
        raise UserError(what, fix=f"give {expected(field.hint)}") from None


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_RECIPE:
            raise UserError(
                f"{path}: {path.stat().st_size:,} bytes are too many for a recipe", fix="name another file"
            )
        # "-sig": some editors on Windows put a byte order mark in front.
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 text", fix="save the file as UTF-8") from None
    except FileNotFoundError:
        close = get_close_matches(path.name, [near.name for near in path.parent.glob("*.toml")], n=1)
        fix = f"did you mean {path.with_name(close[0])}?" if close else "check the name and the folder"
        raise UserError(f"{path}: there is no such recipe file", fix=fix) from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, not a recipe file", fix="name the .toml file in it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}", fix="check the file's rights") from None


def _parse(path: Path, text: str) -> dict[str, Any]:
    for number, row in enumerate(text.split("\n"), start=1):
        if len(row) > MAX_LINE:
            raise UserError(
                f"{path}:{number}: {len(row):,} characters are too many for a line", fix="break it"
            )
    try:
        tree = tomllib.loads(text)
        _refuse_huge_numbers(tree)
        return tree
    except tomllib.TOMLDecodeError as error:
        reason, _, where = str(error).rpartition(" (at ")
        spot = re.fullmatch(r"line (\d+), column (\d+)\)", where)
        lines = text.rstrip().split("\n")
        line, column = (int(spot[1]), int(spot[2])) if spot else (len(lines), len(lines[-1]) + 1)
        shown = lines[line - 1] if line <= len(lines) else ""
        raise UserError(
            f"{path}:{line}:{column}: not valid TOML: {reason[0].lower()}{reason[1:]}: {_short(shown)}",
            fix="name each key and section once"
            if reason.startswith("Cannot")
            else "text goes in quotes, true and false are in small letters, a list is [1, 2]",
        ) from None
    except (RecursionError, ValueError) as error:
        raise UserError(
            f"{path}: not a recipe: {str(error).partition(';')[0]}",
            fix="do not trust this file; write one anew",
        ) from None


def _refuse_huge_numbers(tree: Any) -> None:
    """Python reads hexadecimal numbers of any length, and refuses to write them out beyond 4,300 digits."""
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and value.bit_length() > 1024:
            raise ValueError(f"a number of {value.bit_length():,} bits")


def _unknown_section(path: Path, place: Place, name: str, table: Any) -> UserError:
    """The error for a name at the top of the file that is not a section: a wrong section, or a lost key."""
    if isinstance(table, dict):
        close = get_close_matches(name, sections(), n=1)
        fix = f"did you mean [{close[0]}]?" if close else f"the sections are {', '.join(sections())}"
        return UserError(f"{path}:{place.line}: there is no section [{name}]", fix=fix)
    what = f"{path}:{place.line}: {name} = {_short(place.written)}: stands outside any section"
    return UserError(what, fix=_right_place(name))


def _value(path: Path, place: Place, name: str, raw: Any) -> Any:
    """The checked value of one field."""
    field = recipe_fields().get(name)
    if field is None:
        raise UserError(f"{path}:{place.line}: there is no field {name}", fix=_right_place(name))
    try:
        return from_toml(field.hint, raw)
    except WrongValue:
        shown = _short(place.written) or "a table"
        if problem := not_offered(name, str(raw)):
            raise UserError(
                f"{path}:{place.line}: {name} = {shown}: {problem.what}", fix=problem.fix
            ) from None
        what = f"{path}:{place.line}: {name} = {shown}: expected {expected(field.hint)}"
        raise UserError(what, fix=_repair(field, raw)) from None


def _right_place(name: str) -> str:
    """Where a key that is not a field should have gone."""
    section, _, key = name.rpartition(".")
    guesses = [recipe_fields()[guess] for guess in nearest(name)]
    if not guesses:
        inside = [field.key for field in recipe_fields().values() if field.section == section]
        return f"[{section}] has {', '.join(inside)}" if inside else "docs/recipe.md lists every field"
    homes = " or ".join(f"[{guess.section}]" for guess in guesses)
    if all(guess.key == key for guess in guesses):
        return f"`{key}` lives in {homes}"
    if guesses[0].section == section:
        return f"did you mean {either([guess.key for guess in guesses])}?"
    return f"did you mean {either([f'{guess.key} in [{guess.section}]' for guess in guesses])}?"


def _repair(field: RecipeField, raw: Any) -> str:
    """What to write instead of `raw`: the same thing in the right type, the nearest choice, or an example."""
    if not isinstance(raw, dict | list):
        with suppress(WrongValue):
            return f"write {field.key} = {literal(from_words(field.hint, [str(raw)]))}"
    if close := nearest_choice(field.hint, str(raw)):
        return f"did you mean {literal(close)}?"
    return f"write for example {field.key} = {literal(example(field))}"


def _short(written: str) -> str:
    """A value as the user wrote it, on one line and not longer than a line should be."""
    flat = " ".join(written.split())
    return flat if len(flat) <= 60 else flat[:57] + "..."
