"""The one reader of command lines.

A command declares its options as a dataclass, as the recipe declares its fields: a type with limits, a default, and a
docstring. `read_options` reads them; a field without a default is a positional argument, and a tuple takes all that
are left. `read_recipe` reads the commands that run a recipe, `[RECIPE.toml] [section.key=value ...]
[--section.key value ...] [--options]`: the command line overrides the file, the last of a repeated field counts, and
every field of the result has an origin. `finetune=WEIGHTS` sets model.weights and the fields of `FINETUNE`.

Unknown names, wrong values, arguments without a name, a second file and everything that `rules.py` rejects are
errors. All errors of a command line are reported at once, each with a fix. A recipe file cannot run code that the
command line neither names nor trusts.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar, get_origin

from drumline.config.aliases import method_name
from drumline.config.fields import (
    SWITCHES,
    Field,
    WrongValue,
    expected,
    fields_of,
    from_text,
    nearest,
    nearest_choice,
    recipe_fields,
    value_of,
    with_values,
)
from drumline.config.layouts import Problem, not_offered
from drumline.config.recipe import Recipe
from drumline.config.rules import problems
from drumline.config.sources import SOURCES, names_code, needs_trust
from drumline.config.toml import dump_recipe, literal, load_recipe, short_literal
from drumline.core.errors import UserError, combined
from drumline.core.text import did_you_mean, either

COMMAND_LINE = "command line"
FINETUNE: Mapping[str, Any] = MappingProxyType({"optim.head_lr": "auto"})
"""What `finetune=WEIGHTS` sets besides `model.weights`, unless the file or the command line does."""
Options = TypeVar("Options")
Read = TypeVar("Read", covariant=True)


@dataclass(frozen=True)
class TrustOption:
    """The option of everything that reads a recipe."""

    trust: bool = False
    """Run code that the recipe file names as package.module:factory."""


@dataclass(frozen=True)
class RecipeOptions(TrustOption):
    """The options of every command that runs a recipe."""

    dry_run: bool = False
    """Print the resolved recipe, check data, weights and run folder, print what would happen, and stop."""


@dataclass(frozen=True)
class Invocation(Generic[Read]):
    """A command line that was read. `origins` has "file:line" or "command line" for each field that it sets."""

    recipe: Recipe
    options: Read
    origins: Mapping[str, str]


def read_options(argv: Sequence[str], kind: type[Options], command: str) -> Options:
    """Reads the arguments of a command that has no recipe."""
    known = fields_of(kind)
    positional = [field for field in known.values() if field.default is MISSING]
    line = _read(argv, command, known, {})
    if len(line.arguments) < len(positional) and not line.errors:
        given = f", not only {shlex.join(line.arguments)}" if line.arguments else ""
        needed = [field.name.upper() for field in positional]
        line.errors.append(
            UserError(
                f"{command} needs {' and '.join(needed)}{given}", f"drumline {command} {' '.join(needed)}"
            )
        )
    for setting in line.settings.values():
        if wrong := known[setting.name].check(setting.value):
            line.errors.append(UserError(f"{setting.written}: {wrong.what}", wrong.fix))
    if line.errors:
        raise combined(line.errors)
    arguments: list[Any] = line.arguments
    if positional and _is_list(positional[-1]):
        last = len(positional) - 1
        arguments = [*arguments[:last], tuple(arguments[last:])]
    return kind(*arguments, **{name: setting.value for name, setting in line.settings.items()})


def _as_option(text: str, command: str, options: Mapping[str, Field]) -> str:
    """Translates recipe fields to options of commands that read data: `data.labels=FILE` to `--labels=FILE`, and
    `data.path=DATA` to the plain path."""
    spelled, equals, value = text.partition("=")
    name = spelled.removeprefix("--").replace("-", "_")
    key = name.removeprefix("data.")
    if not equals or name not in recipe_fields():
        return text
    if "source" in options and key in ("path", *options):
        return value if key == "path" else f"--{key}={value}"
    if text.startswith("-"):
        return text
    fix = (
        f"give the path alone: {value}" if key == "path" else f"`drumline {command} --help` lists the options"
    )
    raise UserError(f"{text}: {command} does not take {name}", fix)


def read_recipe(argv: Sequence[str], command: str, kind: type[Options]) -> Invocation[Options]:
    """Reads the arguments of a command that runs a recipe, and checks the recipe."""
    known = fields_of(kind)
    fields = recipe_fields()
    if command in ("train", "distill"):
        fields = {**fields, "finetune": replace(fields["model.weights"], name="finetune")}
    line = _read(argv, command, known, fields)
    for option in (line.settings[name] for name in known if name in line.settings):
        if wrong := known[option.name].check(option.value):
            line.errors.append(UserError(f"{option.written}: {wrong.what}", wrong.fix))
    start = line.settings.pop("finetune", None)
    if start is not None and (not start.value or start.value.startswith("-")):
        fix = "give a run folder, a weights file, or finetune=torchvision:resnet50"
        line.errors.append(UserError(f"{start.written}: has no weights", fix))
    elif start is not None and "model.weights" in line.settings:
        what = f"{start.written} and {line.settings['model.weights'].written} both set weights"
        line.errors.append(UserError(what, "give one of them"))
    if line.errors:
        raise combined(line.errors)
    options = kind(**{name: line.settings.pop(name).value for name in known if name in line.settings})
    recipe, origins = Recipe(), dict[str, str]()
    if line.recipe_file:
        loaded = load_recipe(line.recipe_file)
        recipe, origins = loaded.recipe, dict(loaded.origins)
    if start is not None:
        given = {"model.weights": start.value} | {
            name: value for name, value in FINETUNE.items() if name not in origins
        }
        recipe = with_values(recipe, given)
        origins |= dict.fromkeys(given, "finetune")
    recipe = with_values(recipe, {name: setting.value for name, setting in line.settings.items()})
    recipe = with_values(recipe, {"distill.method": tuple(map(method_name, recipe.distill.method))})
    origins |= dict.fromkeys(line.settings, COMMAND_LINE)
    if line.recipe_file and command in ("train", "distill"):
        run = _run_of(Path(line.recipe_file), recipe, line.settings)
        recipe = with_values(recipe, run)
        origins |= dict.fromkeys(run, f"the folder of {line.recipe_file}")
    path = line.settings.get("data.path")
    if path is not None and not path.value and recipe.data.source == "auto":
        raise UserError(
            f"{path.written}: the value is empty",
            "give the data folder or file (is a shell variable unset?); for the embedded digits, set "
            "data.source=digits",
        )
    if errors := [_error(problem, recipe, line.settings, origins) for problem in problems(recipe)]:
        raise combined(errors)
    trusted = getattr(options, "trust", False) or getattr(options, "dry_run", False)
    if not trusted and (errors := _untrusted_code(recipe, origins, command)):
        raise combined(errors)
    return Invocation(recipe, options, MappingProxyType(origins))


def describe(recipe: Recipe, origins: Mapping[str, str]) -> str:
    """The whole recipe as TOML; each value that is not the default has a comment with its origin."""
    remarks = {}
    for name, known in recipe_fields().items():
        if value_of(recipe, name) != known.default:
            remarks[name] = f"{origins.get(name, 'set')}; default {literal(known.default)}"
    return dump_recipe(recipe, remarks)


EVALUATED = ("data.source", "model.name")
CODE_FIELDS = (*EVALUATED, "data.transform", "optim.name", "train.loss", "distill.teacher", "distill.method")
"""The fields that may name the user's own code: those whose code an evaluation runs, and the others."""


def named_code(recipe: Recipe, fields: Sequence[str] = CODE_FIELDS) -> dict[str, tuple[str, ...]]:
    """The user's own code that a recipe names, by field."""
    found = {}
    for field in fields:
        value = value_of(recipe, field)
        code = tuple(filter(names_code, value if isinstance(value, tuple) else (value,)))
        if code:
            found[field] = code
    return found


@dataclass(frozen=True)
class _Setting:
    """A field or option that a command line sets, and the arguments that set it."""

    name: str
    value: Any
    written: str


@dataclass
class _Line:
    """The parts of a command line."""

    arguments: list[str]
    """Positional arguments."""
    settings: dict[str, _Setting]
    errors: list[UserError]
    recipe_file: str = ""


_ASSIGNMENT = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*=")


def _read(
    argv: Sequence[str], command: str, options: Mapping[str, Field], recipe: Mapping[str, Field]
) -> _Line:
    """Splits a command line. `recipe` is empty for a command without a recipe."""
    line, waiting = _Line([], {}, []), deque(argv)
    positional = [field for field in options.values() if field.default is MISSING]
    most = sys.maxsize if positional and _is_list(positional[-1]) else len(positional)
    while waiting:
        text = waiting.popleft()
        try:
            text = text if recipe else _as_option(text, command, options)
            if (text.startswith("-") and text != "-") or (recipe and _ASSIGNMENT.match(text)):
                setting = _setting(text, waiting, command, options, recipe)
                line.settings[setting.name] = setting
            elif not recipe and len(line.arguments) < most:
                line.arguments.append(text)
            elif not recipe:
                raise UserError(f"{text}: one argument too many", f"see `drumline {command} --help`")
            elif not text.endswith(".toml"):
                raise _unnamed(text, waiting, command)
            elif line.recipe_file:
                what = f"{text}: a second recipe file, after {line.recipe_file}"
                raise UserError(what, "give one file, and single fields as section.key=value")
            else:
                line.recipe_file = text
        except UserError as error:
            line.errors.append(error)
    return line


def _setting(
    text: str,
    waiting: deque[str],
    command: str,
    options: Mapping[str, Field],
    recipe: Mapping[str, Field],
) -> _Setting:
    """Reads `section.key=value`, or a flag and its values, which are taken from `waiting`."""
    spelled, equals, inline = text.partition("=")
    name = spelled.removeprefix("--").replace("-", "_")
    known = recipe.get(name) or (options.get(name) if spelled.startswith("--") else None)
    switch = recipe.get(name.replace(".no_", ".", 1)) if spelled.startswith("--") and not equals else None
    if known is None and switch is not None and switch.hint is bool:
        return _Setting(switch.name, False, text)
    if known is None or known.default is MISSING:
        raise _unknown(spelled, equals + inline, _take_values(waiting), command, options, recipe)
    if equals:
        values = [inline]
    elif get_origin(known.hint) is tuple:
        values = _take_values(waiting)
    elif known.hint is bool:
        values = [waiting.popleft()] if known.section and waiting and _is_value(waiting[0]) else []
    elif waiting and not waiting[0].startswith("--"):
        values = [waiting.popleft()]
    else:
        raise UserError(f"{text}: needs a value", f"for example {_spell(known, text, known.example())}")
    written = text if equals else shlex.join([text, *values])
    try:
        return _Setting(name, from_text(known.hint, values or ["true"] * (known.hint is bool)), written)
    except WrongValue:
        if problem := not_offered(name, values[-1] if values else ""):
            raise UserError(f"{written}: {problem.what}", problem.fix) from None
        close = nearest_choice(known.hint, values[-1]) if values else ""
        fix = f"did you mean {close}?" if close else f"for example {_spell(known, text, known.example())}"
        raise UserError(f"{written}: expected {expected(known.hint)}", fix) from None


def _is_list(field: Field) -> bool:
    """Whether a positional argument takes all that follow."""
    return get_origin(field.hint) is tuple


def _is_value(text: str) -> bool:
    """Whether an argument can only be a value: not a flag, not an assignment, not a recipe file."""
    return not (text.startswith("--") or _ASSIGNMENT.match(text) or text.endswith(".toml"))


def _take_values(waiting: deque[str]) -> list[str]:
    taken = []
    while waiting and _is_value(waiting[0]):
        taken.append(waiting.popleft())
    return taken


def _spell(known: Field, like: str, value: Any) -> str:
    """A setting in the style of `like`: `--optim.lr 0.1`, or `optim.lr=0.1`."""
    if known.hint is bool and not known.section:
        return flag(known)
    values = [
        item if isinstance(item, str) else short_literal(item)
        for item in (value if isinstance(value, tuple) else (value,))
    ]
    if not like.startswith("-"):
        return f"{known.name}={shlex.quote(','.join(values))}"
    return shlex.join([flag(known), *values])


def flag(known: Field) -> str:
    """`--data.eval-crop`."""
    return "--" + known.name.replace("_", "-")


def _unknown(
    spelled: str,
    assigned: str,
    values: list[str],
    command: str,
    options: Mapping[str, Field],
    recipe: Mapping[str, Field],
) -> UserError:
    """The error for an unknown name: the nearest one, in the same style and with the same value."""
    flags = ["--help", *(flag(option) for option in options.values() if option.default is not MISSING)]
    if not recipe:
        fix = did_you_mean(spelled, flags, f"`drumline {command} --help` lists the options")
        return UserError(f"{spelled}: {command} has no such option", fix)
    what = f"{spelled}: there is no such field"
    if close := get_close_matches(spelled.replace("_", "-"), flags, n=1, cutoff=0.75):
        return UserError(what, f"did you mean {close[0]}?")
    bare = spelled.lstrip("-")
    value = assigned.removeprefix("=") or shlex.join(values)
    key = bare.rpartition(".")[2]
    if key in SWITCHES and (value.lower() in ("", "true", "1") or (key == "resume" and value != "auto")):
        weights = "finetune" if "finetune" in recipe else "model.weights"
        run = value if Path(value).exists() and value else "RUN"
        return UserError(what, SWITCHES[key].format(weights=weights, run=run))
    guesses = [recipe[guess] for guess in ((SHORT[spelled],) if spelled in SHORT else nearest(bare))]
    if bare == "data" and (assigned.removeprefix("=") or " ".join(values)) in SOURCES:
        guesses = [recipe["data.source"]]
    if not guesses:
        inside = [known.key for known in recipe.values() if bare.startswith(f"{known.section}.")]
        listed = f"[{bare.partition('.')[0]}] has {', '.join(inside)}" if inside else ""
        return UserError(what, listed or f"`drumline {command} --help` lists every field")
    given = assigned or (f" {shlex.join(values)}" if values else "")
    spellings = [(flag(guess) if spelled.startswith("-") else guess.name) + given for guess in guesses]
    return UserError(what, f"did you mean {either(spellings)}?")


SHORT = {"-b": "data.batch", "-j": "data.workers", "-a": "model.name"}
"""Short flags of other programs."""


def _unnamed(text: str, waiting: deque[str], command: str) -> UserError:
    """The error for an argument that is neither a recipe file nor a setting: which field it may belong to."""
    what = f"{text}: neither a recipe file (.toml) nor section.key=value"
    quoted = shlex.quote(text)
    if text.replace("-", "_") in recipe_fields():
        _take_values(waiting)
        fix = f"write {text}=VALUE without spaces, or --{text} VALUE"
    elif command == "eval" and (Path(text).is_file() or (Path(text) / "recipe.toml").is_file()):
        fix = f"eval scores one model at a time: run `drumline eval {quoted}` separately"
    elif (Path(text) / "recipe.toml").is_file():
        again = shlex.quote(str(Path(text) / "recipe.toml"))
        fix = (
            f"`drumline resume {quoted}` resumes that run; `drumline {command} {again}` starts a new run with the "
            "same recipe"
        )
    elif Path(text).is_dir():
        fix = f"did you mean data.path={quoted}?"
    elif Path(text).is_file():
        fix = f"a recipe file ends in .toml; did you mean data.path={quoted} or model.weights={quoted}?"
    elif Path(text).suffix in (".yaml", ".yml", ".json", ".py"):
        fix = f"recipes are TOML files; `drumline {command} --dry-run > recipe.toml` starts one"
    else:
        fix = f"put the name of the field in front, for example model.name={quoted}"
    return UserError(what, fix)


def _run_of(file: Path, recipe: Recipe, given: Mapping[str, _Setting]) -> dict[str, Any]:
    """`run.dir` and `run.name` for the recipe of a run folder, unless the command line gives them. A resumed run
    continues in the folder of the recipe, wherever that was moved to; otherwise a new run starts beside it."""
    # Not resolved: a link to a run has its own name.
    folder = Path(os.path.normpath(file.absolute().parent))
    if file.name != "recipe.toml" or not any((folder / name).exists() for name in _RUN_FILES):
        return {}
    shown = file.parent.parent if file.parent.name not in ("", "..") else folder.parent
    name = folder.name if recipe.checkpoint.resume == "auto" else "auto"
    return {key: value for key, value in (("run.dir", str(shown)), ("run.name", name)) if key not in given}


_RUN_FILES = ("environment.json", "metrics.jsonl", "checkpoints")
"""Files of a run folder beside its recipe."""


def _untrusted_code(recipe: Recipe, origins: Mapping[str, str], command: str) -> list[UserError]:
    """Errors for the fields with which a recipe file names a module to import, which runs the module. The file may
    come from someone else; what is on the command line is the user's own."""
    errors = []
    for name, code in named_code(recipe, EVALUATED if command == "eval" else CODE_FIELDS).items():
        code = tuple(filter(needs_trust, code))
        if code and origins.get(name, COMMAND_LINE) != COMMAND_LINE:
            value = value_of(recipe, name)
            names = value if isinstance(value, tuple) else (value,)
            module = code[0].partition(":")[0]
            again = shlex.quote(f"{name}={','.join(names)}")
            errors.append(
                UserError(
                    f"{origins[name]}: {name} = {literal(value)}: runs the code of {module}",
                    f"if you wrote or trust this recipe, add --trust, or repeat {again} on the command line",
                    code="untrusted-code",
                )
            )
    return errors


def _error(
    problem: Problem, recipe: Recipe, settings: Mapping[str, _Setting], origins: Mapping[str, str]
) -> UserError:
    """A problem of the recipe, with the origin of the value."""
    if problem.field in settings:
        given = settings[problem.field].written
    else:
        given = f"{problem.field} = {literal(value_of(recipe, problem.field))}"
        origin = origins.get(problem.field)
        given = f"{origin}: {given}" if origin else f"{given} (default)"
    return UserError(f"{given}: {problem.what}", problem.fix)
