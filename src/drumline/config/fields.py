"""The fields of a recipe as data: name, type, default, docstring, and how a value for one is read.

Promises: files and the command line read values by the same rules, and no field is known here by name, so a
section added to `Recipe` is read, written and described like the others.
Refuses (`WrongValue`) what is of another type: text for a number, true for 1, a number that is not finite.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from drumline.config.recipe import Recipe
from drumline.core.suggest import near


@dataclass(frozen=True)
class RecipeField:
    """One field: its dotted name such as `optim.lr`, its type, and the value it has when nothing is said."""

    name: str
    hint: Any
    default: Any

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    @property
    def key(self) -> str:
        return self.name.partition(".")[2]


class WrongValue(ValueError):
    """A value that its field cannot hold; `expected(hint)` says what it could."""


@cache
def recipe_fields() -> Mapping[str, RecipeField]:
    """Every field by its dotted name, in the order of the recipe."""
    defaults = Recipe()
    found = {}
    for section, kind in sections().items():
        hints = get_type_hints(kind)
        for key in fields(kind):
            name = f"{section}.{key.name}"
            found[name] = RecipeField(name, hints[key.name], getattr(getattr(defaults, section), key.name))
    return MappingProxyType(found)


@cache
def sections() -> Mapping[str, Any]:
    """The dataclass of every section by its name, in the order of the recipe."""
    hints = get_type_hints(Recipe)
    return MappingProxyType({section.name: hints[section.name] for section in fields(Recipe)})


def describe_field(field: RecipeField) -> str:
    """The docstring below the field, on one line."""
    return _docstrings(sections()[field.section])[field.key]


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """`recipe` with the fields in `values`, given by dotted name, set."""
    changed = {}
    for section in sections():
        own = {
            name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{section}.")
        }
        changed[section] = replace(getattr(recipe, section), **own)
    return replace(recipe, **changed)


def from_toml(hint: Any, raw: Any) -> Any:
    """The value of type `hint` that a parsed TOML value stands for. A whole number will do for a number."""
    return _read(hint, raw, _toml_leaf)


def from_words(hint: Any, words: Sequence[str]) -> Any:
    """The value of type `hint` that words of a command line stand for; a list as `0.9 0.99` or `0.9,0.99`."""
    if get_origin(hint) is tuple:
        return _read(hint, [part for word in words for part in word.split(",") if part], _word_leaf)
    if len(words) != 1:
        raise WrongValue
    return _read(hint, words[0], _word_leaf)


def expected(hint: Any) -> str:
    """What a value of type `hint` looks like, in words that fit after "expected"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(map(expected, arguments))
    if origin is tuple:
        count = "" if arguments[-1] is ... else f"{len(arguments)} "
        return f"a list of {count}{_PLURALS[arguments[0]]}"
    return _SINGULARS[hint]


def example(field: RecipeField) -> Any:
    """A value to show in a fix; not an empty or false default, which would teach nothing."""
    if isinstance(field.default, bool):
        return not field.default
    if field.default not in ("", ()):
        return field.default
    if get_origin(field.hint) is not tuple:
        return from_words(field.hint, [_SAMPLES[field.hint]])
    # How long a list must be the type does not say, but the docstring may show one.
    for shown in (*describe_field(field).split("`")[1::2], _SAMPLES[get_args(field.hint)[0]]):
        with suppress(WrongValue):
            return from_words(field.hint, [shown])
    raise AssertionError(field.name)


def choices(hint: Any) -> tuple[str, ...]:
    """The words that a value of type `hint` may be; none for a type that is not a choice."""
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return tuple(word for arm in get_args(hint) for word in choices(arm))
    return ()


def nearest_choice(hint: Any, word: str) -> str:
    """The choice of `hint` that a wrong word may have meant; empty when none is near."""
    known, lower = choices(hint), word.lower()
    if VALUES.get(lower) in known:
        return VALUES[lower]
    begun = [choice for choice in known if lower and choice.startswith(lower)]
    return next(iter([*begun, *near(lower, known)]), "")


VALUES = {
    **dict.fromkeys(("gpu", "gpus"), "cuda"),
    **dict.fromkeys(("float16", "half", "16", "amp"), "fp16"),
    **dict.fromkeys(("bfloat16",), "bf16"),
    **dict.fromkeys(("float32", "float", "full", "32"), "fp32"),
    **dict.fromkeys(("data_parallel", "dataparallel"), "dp"),
    **dict.fromkeys(("distributed", "distributed_data_parallel"), "ddp"),
    **dict.fromkeys(("zero", "deepspeed", "fsdp2"), "fsdp"),
    **dict.fromkeys(("multistep", "steplr"), "step"),
    **dict.fromkeys(("error", "raise", "abort"), "stop"),
    **dict.fromkeys(("ignore", "off"), "warn"),
}
"""Choices by what other programs call them."""


def nearest(name: str) -> tuple[str, ...]:
    """Fields that a wrong name, dotted or bare, may have meant, best first; empty when nothing is near."""
    section, _, key = name.lower().replace("-", "_").rpartition(".")
    by_key: dict[str, list[str]] = {}
    for field in recipe_fields().values():
        by_key.setdefault(field.key, []).append(field.name)
    inside = (
        (near(section, sections()) or [full for full in sections() if section.startswith(full)])
        if section
        else []
    )
    beside = {field.key: field.name for field in recipe_fields().values() if field.section in inside}
    if key in beside:
        return (beside[key],)
    if begun := [full for known, full in beside.items() if known.startswith(f"{key}_")]:
        return tuple(begun)
    if key in by_key:
        return tuple(by_key[key])
    if not section and (meant := near(key, MAIN_FIELDS)):
        return (f"{meant[0]}.{MAIN_FIELDS[meant[0]]}",)
    if key in ELSEWHERE:
        return (ELSEWHERE[key],)
    if close := near(key, beside):
        return (beside[close[0]],)
    if len(key) >= 4 and (close := near(key, by_key)):
        return tuple(by_key[close[0]])
    return _described_by(key.replace("_", " ")) if "_" in key else ()


MAIN_FIELDS = {
    "run": "name",
    "data": "path",
    "model": "name",
    "optim": "name",
    "train": "epochs",
    "distill": "method",
    "parallel": "processes",
    "launch": "restarts",
    "guard": "action",
    "checkpoint": "resume",
}
"""What a section's name alone stands for."""

ELSEWHERE = {
    **dict.fromkeys(("batch_size", "batchsize", "bs"), "data.batch"),
    **dict.fromkeys(("dataset", "data_dir", "root"), "data.path"),
    **dict.fromkeys(("img_size", "image_size", "input_size", "crop_size", "resolution"), "data.size"),
    **dict.fromkeys(("num_workers", "nworkers"), "data.workers"),
    **dict.fromkeys(("arch", "architecture", "net", "network", "backbone"), "model.name"),
    **dict.fromkeys(("num_classes", "nclasses"), "model.classes"),
    **dict.fromkeys(("pretrained", "finetune", "initial_checkpoint", "ckpt"), "model.weights"),
    **dict.fromkeys(("opt", "optimizer"), "optim.name"),
    **dict.fromkeys(("learning_rate",), "optim.lr"),
    **dict.fromkeys(("wd", "decay"), "optim.weight_decay"),
    **dict.fromkeys(("sched", "scheduler", "lr_scheduler"), "optim.schedule"),
    **dict.fromkeys(("clip_grad", "grad_clip", "max_norm", "clip_grad_norm"), "optim.clip"),
    **dict.fromkeys(("amp", "fp16", "bf16", "dtype", "half"), "train.precision"),
    **dict.fromkeys(("grad_accum", "accumulation", "accum_iter", "grad_accum_steps"), "train.accumulate"),
    **dict.fromkeys(("max_epochs", "num_epochs", "n_epochs", "nepochs"), "train.epochs"),
    **dict.fromkeys(("max_steps", "iterations", "iters"), "train.steps"),
    **dict.fromkeys(("model_ema", "ema_decay"), "train.ema"),
    **dict.fromkeys(
        ("gpus", "nproc", "nproc_per_node", "num_gpus", "ngpus", "devices"), "parallel.processes"
    ),
    **dict.fromkeys(("num_nodes", "nnodes"), "parallel.nodes"),
    **dict.fromkeys(("output", "output_dir", "out_dir", "save_dir", "logdir", "log_dir"), "run.dir"),
    **dict.fromkeys(("experiment", "exp_name"), "run.name"),
    **dict.fromkeys(("temperature", "tau"), "distill.T"),
}
"""Fields by what other programs call them."""


_SINGULARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_PLURALS = {bool: "true or false", int: "whole numbers", float: "numbers", str: "texts"}
_SAMPLES = {int: "1,2,3", float: "0.25,0.5,0.75", str: "NAME"}


def _described_by(words: str) -> tuple[str, ...]:
    """Fields whose docstring has `words`: how `learning_rate` leads to `optim.lr`."""
    return tuple(field.name for field in recipe_fields().values() if words in describe_field(field).lower())


@cache
def _docstrings(kind: type) -> Mapping[str, str]:
    """The string below each field of a dataclass, by field. Python keeps it in the source only."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for above, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(above.target, ast.Name)
            found[above.target.id] = " ".join(ast.literal_eval(below.value).split())
    return MappingProxyType(found)


def _read(hint: Any, raw: Any, leaf: Callable[[type, Any], Any]) -> Any:
    """Follow the shape of `hint` through `raw`; `leaf` reads the single values."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _first(arguments, lambda choice: _same(choice, leaf(type(choice), raw)))
    if origin in (Union, UnionType):
        return _first(arguments, lambda arm: _read(arm, raw, leaf))
    if origin is tuple:
        if isinstance(raw, str) and arguments == (str, ...):
            raw = [raw]  # a list of one name may be written as the name
        if not isinstance(raw, list):
            raise WrongValue
        kinds = arguments[:1] * len(raw) if arguments[-1] is ... else arguments
        if len(kinds) != len(raw):
            raise WrongValue
        return tuple(_read(kind, item, leaf) for kind, item in zip(kinds, raw, strict=True))
    return leaf(hint, raw)


def _first(arms: Sequence[Any], read: Callable[[Any], Any]) -> Any:
    """What the first arm that can be read gives."""
    for arm in arms:
        try:
            return read(arm)
        except WrongValue:
            continue
    raise WrongValue


def _same(choice: Any, value: Any) -> Any:
    if choice != value:
        raise WrongValue
    return choice


def _toml_leaf(kind: type, raw: Any) -> Any:
    if kind is float and type(raw) in (int, float):
        return _finite(raw)
    if type(raw) is not kind:
        raise WrongValue
    return raw


def _word_leaf(kind: type, word: str) -> Any:
    if kind is bool:
        if word.lower() not in ("true", "false"):
            raise WrongValue
        return word.lower() == "true"
    try:
        return _finite(word) if kind is float else kind(word)
    except ValueError as error:
        raise WrongValue from error


def _finite(raw: str | float) -> float:
    try:
        number = float(raw)
    except OverflowError as error:
        raise WrongValue from error
    if not math.isfinite(number):
        raise WrongValue
    return number
