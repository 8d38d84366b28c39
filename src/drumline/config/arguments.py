"""The command line of the commands that run a recipe: `[recipe.toml] [section.key=value ...] [--flags]`.

Promises: flags beat the file wherever they stand, the last of a repeated flag counts, every field of the
result knows where it came from, and all mistakes of a line are told at once, each with its fix.
Refuses unknown names, loose words, a second file, whatever `recipe_checks` finds impossible, and code that a recipe
file names and nobody vouches for.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, make_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NoReturn, get_origin

from drumline.config.fields import (
    RecipeField,
    WrongValue,
    describe_field,
    example,
    expected,
    from_words,
    nearest,
    nearest_choice,
    recipe_fields,
    sections,
    with_values,
)
from drumline.config.layouts import not_offered
from drumline.config.recipe import Recipe, value_of
from drumline.config.rules import Problem, problems
from drumline.config.toml import dump_recipe, literal, load_recipe, together
from drumline.core.errors import UserError
from drumline.core.text import either

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Invocation:
    """What a command line asks for. `came_from` has "file:line" or "command line" for each field it sets."""

    recipe: Recipe
    dry_run: bool
    came_from: Mapping[str, str]
    trust: bool = False


def parse(argv: Sequence[str], command: str, description: str) -> Invocation:
    """Read the words after `drumline COMMAND`. `--help` prints the help and leaves with exit code 0."""
    if "--help" in argv or "-h" in argv:
        _show_help(command, description)
    line = _read(argv, command)
    recipe, came_from = Recipe(), dict[str, str]()
    if line.recipe_file:
        loaded = load_recipe(line.recipe_file)
        recipe = loaded.recipe
        came_from = {name: f"{loaded.path}:{number}" for name, number in loaded.lines.items()}
    recipe = with_values(recipe, {name: setting.value for name, setting in line.settings.items()})
    came_from |= dict.fromkeys(line.settings, COMMAND_LINE)
    if line.recipe_file and command in ("train", "distill"):
        run = _run_of(Path(line.recipe_file), recipe, line.settings)
        recipe = with_values(recipe, run)
        came_from |= dict.fromkeys(run, f"the folder of {line.recipe_file}")
    empty = line.settings.get("data.path")
    if empty is not None and not empty.value and recipe.data.source == "auto":
        raise UserError(
            f"{empty.written}: the value is empty",
            "give the data folder or file (is a shell variable unset?); for the embedded digits, set "
            "data.source=digits",
        )
    if impossible := [_complaint(problem, recipe, line, came_from) for problem in problems(recipe)]:
        raise together(impossible)
    if not line.trust and not line.dry_run and (named := _code_of_files(recipe, came_from)):
        raise together(named)
    return Invocation(recipe, line.dry_run, MappingProxyType(came_from), line.trust)


def describe(recipe: Recipe, came_from: Mapping[str, str]) -> str:
    """The whole recipe as TOML; each value that is not the default says where it came from."""
    remarks = {}
    for name, known in recipe_fields().items():
        if value_of(recipe, name) != known.default:
            remarks[name] = f"{came_from.get(name, 'set')}; default {literal(known.default)}"
    return dump_recipe(recipe, remarks)


def _run_of(file: Path, recipe: Recipe, given: Mapping[str, _Setting]) -> dict[str, Any]:
    """What the recipe of a run folder means for `run.dir` and `run.name`, unless the command line gives them:
    resumed, the very folder it lies in, wherever that was moved to; otherwise a new one beside it."""
    folder = Path(
        os.path.normpath(file.absolute().parent)
    )  # not resolved: a link to a run has a name of its own
    if file.name != "recipe.toml" or not any((folder / name).exists() for name in _BESIDE):
        return {}
    shown = file.parent.parent if file.parent.name not in ("", "..") else folder.parent
    name = folder.name if recipe.checkpoint.resume == "auto" else "auto"
    return {key: value for key, value in (("run.dir", str(shown)), ("run.name", name)) if key not in given}


_BESIDE = ("environment.json", "metrics.jsonl", "checkpoints")
"""Files of a run folder, beside its recipe."""


@dataclass(frozen=True)
class _Setting:
    """One field as a command line sets it: the value, and the words that gave it."""

    name: str
    value: Any
    written: str


@dataclass(frozen=True)
class _Line:
    """A command line taken apart."""

    recipe_file: str
    settings: Mapping[str, _Setting]
    dry_run: bool
    trust: bool


_ASSIGNMENT = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*=")


def _read(argv: Sequence[str], command: str) -> _Line:
    """Take the words apart; every mistake in them is told in one error."""
    recipe_file, settings, dry_run, trust = "", dict[str, _Setting](), False, False
    mistakes: list[UserError] = []
    waiting = deque(argv)
    while waiting:
        word = waiting.popleft()
        try:
            if word.replace("_", "-") == "--dry-run":
                dry_run = True
            elif word == "--trust":
                trust = True
            elif word.startswith("-") or _ASSIGNMENT.match(word):
                setting = _setting(word, waiting, command)
                settings[setting.name] = setting
            elif not word.endswith(".toml"):
                raise _stray(word, waiting, command)
            elif recipe_file:
                what = f"{word}: a second recipe file, after {recipe_file}"
                raise UserError(what, fix="give one file, and single fields as section.key=value")
            else:
                recipe_file = word
        except UserError as mistake:
            mistakes.append(mistake)
    if mistakes:
        raise together(mistakes)
    return _Line(recipe_file, settings, dry_run, trust)


def _setting(word: str, waiting: deque[str], command: str) -> _Setting:
    """Read `section.key=value`, or a flag together with the words of its value taken from `waiting`."""
    spelled, equals, inline = word.partition("=")
    name = spelled.removeprefix("--").replace("-", "_")
    known = recipe_fields().get(name)
    switch = recipe_fields().get(name.replace(".no_", ".", 1))
    if known is None and switch is not None and switch.hint is bool and word.startswith("--") and not equals:
        return _Setting(switch.name, False, word)
    if known is None:
        raise _unknown(spelled, equals + inline, _take_loose(waiting), command)
    if equals:
        words = [inline]
    elif get_origin(known.hint) is tuple:
        words = _take_loose(waiting)
    elif known.hint is bool:
        words = [waiting.popleft()] if waiting and _is_loose(waiting[0]) else []
    elif waiting and not waiting[0].startswith("--"):
        words = [waiting.popleft()]
    else:
        raise UserError(f"{word}: needs a value", fix=f"for example {_spell(known, word, example(known))}")
    written = word if equals else shlex.join([word, *words])
    try:
        return _Setting(name, from_words(known.hint, words or ["true"] * (known.hint is bool)), written)
    except WrongValue:
        if problem := not_offered(name, words[-1] if words else ""):
            raise UserError(f"{written}: {problem.what}", fix=problem.fix) from None
        close = nearest_choice(known.hint, words[-1]) if words else ""
        fix = f"did you mean {close}?" if close else f"for example {_spell(known, word, example(known))}"
        raise UserError(f"{written}: expected {expected(known.hint)}", fix=fix) from None


def _is_loose(word: str) -> bool:
    """Whether a word can only be part of a value: not a flag, not an assignment, not a recipe file."""
    return not (word.startswith("--") or _ASSIGNMENT.match(word) or word.endswith(".toml"))


def _take_loose(waiting: deque[str]) -> list[str]:
    taken = []
    while waiting and _is_loose(waiting[0]):
        taken.append(waiting.popleft())
    return taken


def _spell(known: RecipeField, like: str, value: Any) -> str:
    """A setting in the manner of `like`: `--optim.lr 0.1`, or `optim.lr=0.1`."""
    parts = value if isinstance(value, tuple) else (value,)
    words = [part if isinstance(part, str) else literal(part).removesuffix(".0") for part in parts]
    if not like.startswith("-"):
        return f"{known.name}={shlex.quote(','.join(words))}"
    return shlex.join([_flag(known), *words])


def _flag(known: RecipeField) -> str:
    return "--" + known.name.replace("_", "-")


def _unknown(spelled: str, assigned: str, loose: list[str], command: str) -> UserError:
    """The error for a name that is no field: the field meant, written as the name was, with the value given."""
    what = f"{spelled}: there is no such field"
    if close := get_close_matches(
        spelled.replace("_", "-"), ["--dry-run", "--trust", "--help"], n=1, cutoff=0.75
    ):
        return UserError(what, fix=f"did you mean {close[0]}?")
    bare = spelled.lstrip("-")
    meant = (SHORT[spelled],) if spelled in SHORT else nearest(bare)
    guesses = [recipe_fields()[guess] for guess in meant]
    value = assigned.removeprefix("=") or " ".join(loose)
    if bare == "data" and value in SOURCES:
        guesses = [recipe_fields()["data.source"]]
    if not guesses:
        inside = [known.key for known in recipe_fields().values() if bare.startswith(f"{known.section}.")]
        listed = f"[{bare.partition('.')[0]}] has {', '.join(inside)}" if inside else ""
        return UserError(what, fix=listed or f"`drumline {command} --help` lists every field")
    flag = spelled.startswith("-")
    given = assigned or (f" {shlex.join(loose)}" if loose else "")
    spellings = either([(_flag(guess) if flag else guess.name) + given for guess in guesses])
    return UserError(what, fix=f"did you mean {spellings}?")


SHORT = {"-b": "data.batch", "-j": "data.workers", "-a": "model.name"}
"""Short flags of other programs."""
SOURCES = ("folder", "tar", "packed", "idx", "cifar10", "cifar100", "npz", "digits", "synthetic")
"""Names that `data.source` takes, known here without importing what reads them."""


def _stray(word: str, waiting: deque[str], command: str) -> UserError:
    """The error for a word that stands alone: what it may have been meant for."""
    what = f"{word}: neither a recipe file (.toml) nor section.key=value"
    quoted = shlex.quote(word)
    if word.replace("-", "_") in recipe_fields():
        _take_loose(waiting)
        fix = f"write {word}=VALUE without spaces, or --{word} VALUE"
    elif command == "eval" and (Path(word).is_file() or (Path(word) / "recipe.toml").is_file()):
        fix = f"eval scores one model at a time: run `drumline eval {quoted}` separately"
    elif (Path(word) / "recipe.toml").is_file():
        again = shlex.quote(str(Path(word) / "recipe.toml"))
        fix = (
            f"`drumline {command} {again} checkpoint.resume=auto` goes on with that run; without checkpoint.resume "
            "it is repeated in a new folder"
        )
    elif Path(word).is_dir():
        fix = f"did you mean data.path={quoted}?"
    elif Path(word).is_file():
        fix = f"a recipe file ends in .toml; did you mean data.path={quoted} or model.weights={quoted}?"
    elif Path(word).suffix in (".yaml", ".yml", ".json", ".py"):
        fix = f"recipes are TOML files; `drumline {command} --dry-run > recipe.toml` starts one"
    else:
        fix = f"put the field in front, for example model.name={quoted}"
    return UserError(what, fix=fix)


def _code_of_files(recipe: Recipe, came_from: Mapping[str, str]) -> list[UserError]:
    """Fields by which a recipe file names a module to import, which runs it. The file, or the run folder it lies in,
    may be a stranger's; what stands on the command line is the user's own."""
    refused = []
    for name in ("data.source", "model.name", "distill.teacher"):
        value = value_of(recipe, name)
        parts = value if isinstance(value, tuple) else (value,)
        code = [part for part in parts if names_code(part)]
        if code and came_from.get(name, COMMAND_LINE) != COMMAND_LINE:
            what = (
                f"{came_from[name]}: {name} = {literal(value)}: runs the code of {code[0].partition(':')[0]}"
            )
            again = shlex.quote(f"{name}={','.join(parts)}")
            fix = f"if you wrote or trust this recipe, add --trust, or repeat {again} on the command line"
            refused.append(UserError(what, fix=fix))
    return refused


def names_code(name: str) -> bool:
    """Whether a name of a model or a source is a `package.module:factory` of somebody's."""
    return ":" in name and not name.startswith(("torchvision/", "timm/"))


def _complaint(problem: Problem, recipe: Recipe, line: _Line, came_from: Mapping[str, str]) -> UserError:
    """A problem of the resolved recipe, with the place its value came from."""
    if problem.field in line.settings:
        where = line.settings[problem.field].written
    else:
        where = f"{problem.field} = {literal(value_of(recipe, problem.field))}"
        where = f"{came_from[problem.field]}: {where}" if problem.field in came_from else f"{where} (default)"
    return UserError(f"{where}: {problem.what}", fix=problem.fix)


def _show_help(command: str, description: str) -> NoReturn:
    """Print every field with its docstring, and examples below, where a terminal leaves the eye."""
    # Imported here: only the help needs it, and it takes longer to import than the rest of this module.
    import tyro

    parts: list[Any] = []
    for section, kind in sections().items():
        own = [known for known in recipe_fields().values() if known.section == section]
        shown = make_dataclass(
            section, [_documented(known) for known in own], namespace={"__doc__": kind.__doc__}
        )
        parts.append((section, shown, field(default_factory=shown)))
    dry_run = tyro.conf.arg(
        help="Print the resolved recipe, check data, weights and run folder, say what would happen, then stop.",
        help_behavior_hint="",
    )
    parts.insert(0, ("dry_run", Annotated[tyro.conf.FlagCreatePairsOff[bool], dry_run], field(default=False)))
    trust = tyro.conf.arg(
        help="Run the code that the recipe file names as package.module:factory.", help_behavior_hint=""
    )
    parts.insert(1, ("trust", Annotated[tyro.conf.FlagCreatePairsOff[bool], trust], field(default=False)))
    with suppress(SystemExit):
        tyro.cli(
            make_dataclass("Recipe", parts),
            prog=f"drumline {command} [RECIPE.toml] [section.key=value ...]",
            description=f"{description}\n\n{_GRAMMAR}",
            args=["--help"],
        )
    print(_EXAMPLES[command])
    raise SystemExit(0)


def _documented(known: RecipeField) -> tuple[str, Any, Any]:
    """A dataclass field like `known` that carries its docstring and default in the form tyro shows."""
    import tyro

    parts = known.default if isinstance(known.default, tuple) else (known.default,)
    words = " ".join(part if isinstance(part, str) else literal(part) for part in parts) or "none"
    told = tyro.conf.arg(help=describe_field(known), help_behavior_hint=f"(default: {words})")
    return known.key, Annotated[known.hint, told], field(default=known.default)


# tyro keeps a line break only in front of a line that does not start with a letter.
_GRAMMAR = """\
Every field has a default. To set one:
  lr = 0.2          below [optim] in RECIPE.toml
  optim.lr=0.2      on the command line, which beats the file
  --optim.lr 0.2    the same as a flag"""
_EXAMPLES = {
    "train": """\
examples:
  drumline train data.path=photos model.name=resnet50
  drumline train recipe.toml optim.lr=0.2 --train.compile
  drumline train --optim.name adamw --optim.betas 0.9 0.99 optim.lr=1e-3
  drumline train recipe.toml --dry-run       show what would happen
  drumline train --dry-run > recipe.toml     start a recipe file of your own""",
    "distill": """\
examples:
  drumline distill distill.teacher_weights=runs/teacher model.name=resnet18 ...
  drumline distill ... distill.method=dkd distill.options=beta:2,warmup:5
  drumline distill ... distill.method=crd,kd distill.b=0.8 distill.a=1
  drumline distill ... distill.cache=caches/teacher       keep the teacher's outputs
  drumline distill cifar100/crd/resnet32x4-resnet8x4 data.path=cifar100
      distill.teacher_weights=runs/resnet32x4             a published recipe
  drumline distill --presets                              list them""",
}
