"""Fields as data: name, type, default, limits and docstring of a recipe field or a command's option.

Files and the command line read values by the same rules. No field is known here by name, so a section added to
`Recipe` is read, written and described like the others. A value of the wrong type raises `WrongValue`: text for a
number, true for 1, a number that is not finite.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from drumline.config.limits import Descriptions, Names, PerMachine, Wrong
from drumline.config.recipe import Recipe
from drumline.core.text import near


@dataclass(frozen=True)
class Field:
    """A field of a recipe, named `section.key`, or an option of a command, which has no section. An option without a
    default (`MISSING`) is positional."""

    name: str
    hint: Any
    default: Any
    limits: tuple[Any, ...]
    owner: type
    per_machine: PerMachine | None = None

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def help(self) -> str:
        """The docstring below the field, on one line."""
        return _docstrings(self.owner)[self.key]

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that the value may be; none for a value that is not a name."""
        return choices(self.hint) or tuple(name for limit in self._tables for name in limit.names)

    @property
    def details(self) -> str:
        """What each name means, if they come from a table."""
        return " ".join(limit.details for limit in self._tables)

    @property
    def _tables(self) -> list[Names | Descriptions]:
        return [limit for limit in self.limits if isinstance(limit, Names | Descriptions)]

    def check(self, value: Any) -> Wrong | None:
        """What is wrong with a value of the right type."""
        return next(filter(None, (limit.check(value) for limit in self.limits)), None)

    def takes(self) -> str:
        """The type and limits in plain English."""
        return "; ".join(filter(None, [expected(self.hint), *map(str, self.limits)]))

    def example(self) -> Any:
        """A value to show in a fix. Not an empty or false default, which would teach nothing."""
        if isinstance(self.default, bool):
            return not self.default
        listed = [limit.example for limit in self.limits if getattr(limit, "example", None) is not None]
        if self.default not in ("", (), MISSING):
            number = self.default == "auto" and listed and not isinstance(listed[0], str)
            return listed[0] if number else self.default
        kind = get_args(self.hint)[0] if get_origin(self.hint) is tuple else self.hint
        return listed[0] if listed else from_text(self.hint, [_SAMPLES[kind]])


class WrongValue(ValueError):
    """A value of the wrong type; `expected(hint)` describes the right one."""


def fields_of(kind: type, section: str = "") -> Mapping[str, Field]:
    """The fields of a dataclass by name, in order."""
    hints, bare = get_type_hints(kind, include_extras=True), get_type_hints(kind)
    found = {}
    for each in fields(kind):
        name = f"{section}.{each.name}" if section else each.name
        marks = getattr(hints[each.name], "__metadata__", ())
        limits = tuple(mark for mark in marks if not isinstance(mark, PerMachine))
        per_machine = next((mark for mark in marks if isinstance(mark, PerMachine)), None)
        found[name] = Field(name, bare[each.name], each.default, limits, kind, per_machine)
    return found


@cache
def recipe_fields() -> Mapping[str, Field]:
    """Every field by its dotted name, in the order of the recipe."""
    return MappingProxyType(
        {
            name: each
            for section, kind in sections().items()
            for name, each in fields_of(kind, section).items()
        }
    )


@cache
def sections() -> Mapping[str, Any]:
    """The dataclass of every section by its name, in the order of the recipe."""
    hints = get_type_hints(Recipe)
    return MappingProxyType({section.name: hints[section.name] for section in fields(Recipe)})


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """`recipe` with new values for some fields, given by dotted name. Does not check them."""
    changed = {}
    for section in sections():
        own = {
            name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{section}.")
        }
        changed[section] = replace(getattr(recipe, section), **own)
    return replace(recipe, **changed)


def value_of(recipe: Recipe, name: str) -> Any:
    """The value at a dotted name such as `optim.lr`."""
    section, key = name.split(".")
    return getattr(getattr(recipe, section), key)


def from_toml(hint: Any, raw: Any) -> Any:
    """The value of type `hint` of a parsed TOML value. A whole number is accepted for a number."""
    return _read(hint, raw, _toml_leaf)


def from_text(hint: Any, texts: Sequence[str]) -> Any:
    """The value of type `hint` of a command line's arguments; a list is `0.9 0.99` or `0.9,0.99`."""
    if get_origin(hint) is tuple:
        return _read(hint, [item for text in texts for item in text.split(",") if item], _text_leaf)
    if len(texts) != 1:
        raise WrongValue
    return _read(hint, texts[0], _text_leaf)


def expected(hint: Any) -> str:
    """A description of the type that fits after "expected"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(map(expected, arguments))
    if origin is tuple:
        count = "" if arguments[-1] is ... else f"{len(arguments)} "
        return f"a list of {count}{_PLURALS[arguments[0]]}"
    return _SINGULARS[hint]


def choices(hint: Any) -> tuple[str, ...]:
    """The names that a value of type `hint` may be; none for a type without names."""
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return tuple(name for arm in get_args(hint) for name in choices(arm))
    return ()


def nearest_choice(hint: Any, text: str) -> str:
    """The choice of `hint` that is most similar to `text`; empty if none is similar."""
    known, lower = choices(hint), text.lower()
    if VALUES.get(lower) in known:
        return VALUES[lower]
    longer = [choice for choice in known if lower and choice.startswith(lower)]
    return next(iter([*longer, *near(lower, known)]), "")


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
"""Choices by their names in other programs."""


def nearest(name: str) -> tuple[str, ...]:
    """Fields that are most similar to an unknown name, dotted or not, best first; empty if none is similar."""
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
    if longer := [full for known, full in beside.items() if known.startswith(f"{key}_")]:
        return tuple(longer)
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
    return ()


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
"""The field that a section's name alone stands for."""

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
    **dict.fromkeys(("epoch", "max_epochs", "num_epochs", "n_epochs", "nepochs"), "train.epochs"),
    **dict.fromkeys(("max_steps", "iterations", "iters"), "train.steps"),
    **dict.fromkeys(("model_ema", "ema_decay"), "train.ema"),
    **dict.fromkeys(("early_stopping", "early_stop", "early_stopping_patience"), "train.patience"),
    **dict.fromkeys(("monitor", "best_metric", "eval_metric", "metric_for_best_model"), "checkpoint.best"),
    **dict.fromkeys(
        ("gpus", "nproc", "nproc_per_node", "num_gpus", "ngpus", "devices"), "parallel.processes"
    ),
    **dict.fromkeys(("num_nodes", "nnodes"), "parallel.nodes"),
    **dict.fromkeys(("output", "output_dir", "out_dir", "save_dir", "logdir", "log_dir"), "run.dir"),
    **dict.fromkeys(("experiment", "exp_name"), "run.name"),
    **dict.fromkeys(("temperature", "tau"), "distill.T"),
    **dict.fromkeys(("criterion", "loss_fn", "bce_loss"), "train.loss"),
    **dict.fromkeys(("model_kwargs", "drop_rate", "drop_path_rate"), "model.args"),
    **dict.fromkeys(("opt_kwargs", "opt_args"), "optim.args"),
    **dict.fromkeys(("degrees", "rotate"), "data.rotation"),
    **dict.fromkeys(("transforms", "augmentation", "aug"), "data.transform"),
}
"""Fields by their names in other programs."""

SWITCHES = {
    "pretrained": "to start from published weights, give {weights}=torchvision:NAME or {weights}=timm:NAME",
    "resume": "to continue a run: drumline resume {run}",
    **dict.fromkeys(("amp", "bf16"), "did you mean train.precision=bf16?"),
    **dict.fromkeys(("fp16", "half"), "did you mean train.precision=fp16?"),
}
"""Fixes for names that other programs switch on without a value, or with `true`."""


_SINGULARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_PLURALS = {bool: "true or false", int: "whole numbers", float: "numbers", str: "texts"}
_SAMPLES = {int: "1,2,3", float: "0.25,0.5,0.75", str: "NAME"}


@cache
def _docstrings(kind: type) -> Mapping[str, str]:
    """The string below each field of a dataclass, by field. Only the source contains it."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {
        key: text for base in kind.__bases__ if base is not object for key, text in _docstrings(base).items()
    }
    for above, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(above.target, ast.Name)
            found[above.target.id] = " ".join(ast.literal_eval(below.value).split())
    return MappingProxyType(found)


def _read(hint: Any, raw: Any, leaf: Callable[[type, Any], Any]) -> Any:
    """Reads `raw` as the type `hint`; `leaf` reads the single values."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _first(arguments, lambda choice: _same(choice, leaf(type(choice), raw)))
    if origin in (Union, UnionType):
        return _first(arguments, lambda arm: _read(arm, raw, leaf))
    if origin is tuple:
        if isinstance(raw, str) and arguments == (str, ...):
            raw = [raw]  # a list of one name may be written as the name alone
        if not isinstance(raw, list):
            raise WrongValue
        kinds = arguments[:1] * len(raw) if arguments[-1] is ... else arguments
        if len(kinds) != len(raw):
            raise WrongValue
        return tuple(_read(kind, item, leaf) for kind, item in zip(kinds, raw, strict=True))
    return leaf(hint, raw)


def _first(arms: Sequence[Any], read: Callable[[Any], Any]) -> Any:
    """The result of the first arm that can be read."""
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


def _text_leaf(kind: type, text: str) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise WrongValue
        return text.lower() == "true"
    try:
        return _finite(text) if kind is float else kind(text)
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
