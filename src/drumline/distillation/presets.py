"""Published recipes by name: `cifar100/dkd/resnet56-resnet20` stands for the arguments that set its fields.

Promises: `preset_arguments` returns `section.key=value` arguments as a user would type them, computed from the tables
of `literature`. Every name in `preset_names` has them. A preset with a figure runs the recipe that gave the figure;
`published_by` says whose it is. Rejects an unknown name and suggests similar ones.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from drumline.core.errors import UserError
from drumline.core.text import either
from drumline.distillation.literature import BENCHMARKS, SMALL, Benchmark, Settings


def preset_arguments(name: str) -> list[str]:
    """The recipe that `name` stands for, without the paths of the data and of the teacher's weights."""
    benchmark, kind, networks = _parse(name)
    if kind in _SINGLE:
        single = Settings(epochs=benchmark.single_epochs, milestones=benchmark.single_milestones)
        model = f"model.name={_model(benchmark, networks)}"
        return [*_data(benchmark, single), model, *_schedule(benchmark, networks, single)]
    teacher, student = networks.split("-")
    settings = benchmark.settings_for(kind, networks)
    argv = [*_data(benchmark, settings), f"model.name={_model(benchmark, student)}"]
    argv += [f"distill.teacher={_model(benchmark, teacher)}", f"distill.method={kind.partition('+')[0]}"]
    argv += [f"distill.r={settings.r}", f"distill.a={settings.a}"]
    argv += [f"distill.b={settings.b}"] if settings.b is not None else []
    argv += [f"distill.T={settings.T}"] if settings.a or _reads_temperature(kind.partition("+")[0]) else []
    argv += ["distill.standardise=true"] if settings.standardise else []
    argv += [f"distill.options={','.join(settings.options)}"] if settings.options else []
    argv += [f"distill.initial_lr={settings.initial_lr}"] if settings.initial_lr is not None else []
    return argv + _schedule(benchmark, student, settings)


@cache
def preset_names() -> tuple[str, ...]:
    """Every preset, ordered by data set, method and pair."""
    found = []
    for name, benchmark in BENCHMARKS.items():
        for kind, end in _SINGLE.items():
            networks = dict.fromkeys(pair.split("-")[end] for pair in benchmark.pairs)
            found += [f"{name}/{kind}/{network}" for network in networks]
        for method in benchmark.methods():
            found += [f"{name}/{method}/{pair}" for pair in benchmark.pairs if benchmark.offers(method, pair)]
    return tuple(found)


def is_preset(argument: str) -> bool:
    """Whether an argument names a preset rather than a file, a folder or an assignment."""
    named = argument.startswith(tuple(f"{name}/" for name in BENCHMARKS))
    return named and "=" not in argument and not argument.endswith(".toml") and not Path(argument).exists()


def published(name: str) -> float | None:
    """The published top-1 accuracy in percent of this recipe, or None."""
    benchmark, kind, networks = _parse(name)
    if kind in _SINGLE:
        ends = [pair.split("-")[_SINGLE[kind]] for pair in benchmark.pairs]
        return benchmark.figures[kind][ends.index(networks)]
    return benchmark.figure(kind, networks)


def published_by(name: str) -> str | None:
    """The source of the figure that `published` returns, or None without a figure."""
    benchmark, kind, _ = _parse(name)
    return benchmark.authors[kind] if published(name) is not None else None


def listing() -> str:
    """The output of `drumline distill --presets`: a table per data set, then how to use a preset."""
    return "\n\n".join([*(_table(name, benchmark) for name, benchmark in BENCHMARKS.items()), _USAGE])


_SINGLE = {"teacher": 0, "alone": 1}
"""Recipes without distillation, and the network of a pair that they train."""
_TAKEN = ("vgg13", "resnet50")
"""CIFAR networks whose plain name belongs to an ImageNet network."""

_SPELLINGS = {
    "at": "attention",
    "sp": "similarity",
    "fitnet": "hint",
    "cc": "correlation",
    "ft": "factor",
    "ab": "abound",
    "student": "alone",
    "mobilenetv2": "mobilenet_v2_half",
    "shufflev1": "shufflenet_v1",
    "shufflev2": "shufflenet_v2",
}
"""Names from the literature, for suggestions."""


def _reads_temperature(method: str) -> bool:
    # Imported here, because methods import torch, which a launcher does without.
    from drumline.distillation.method import options_of
    from drumline.distillation.methods import METHODS

    return "T" in options_of(METHODS[method])


def _parse(name: str) -> tuple[Benchmark, str, str]:
    """Benchmark, method, and pair or network of a preset."""
    if name not in preset_names():
        raise UserError(f"there is no preset {name!r}", fix=_fix(name))
    start, kind, networks = name.split("/")
    return BENCHMARKS[start], kind, networks


def _fix(name: str) -> str:
    """Suggests presets: the same name in our spelling, completions of it, similar names of the method, similar
    names."""
    spelled = "".join(_SPELLINGS.get(part, part) for part in re.split(r"([/+-])", name.lower()))
    known = preset_names()
    method = spelled.rpartition("/")[0] + "/"
    near = (
        [candidate for candidate in known if candidate == spelled]
        or [candidate for candidate in known if candidate.startswith(spelled)][:3]
        or get_close_matches(
            spelled, [candidate for candidate in known if candidate.startswith(method)], n=3, cutoff=0.7
        )
        or get_close_matches(spelled, known, n=3, cutoff=0.7)
    )
    return f"did you mean {either(near)}?" if near else "`drumline distill --presets` lists them"


def _model(benchmark: Benchmark, network: str) -> str:
    return f"cifar/{network}" if benchmark is BENCHMARKS["cifar100"] and network in _TAKEN else network


def _data(benchmark: Benchmark, settings: Settings) -> list[str]:
    return [*benchmark.data, f"data.batch={settings.batch or benchmark.batch}"]


def _schedule(benchmark: Benchmark, network: str, settings: Settings) -> list[str]:
    lr = settings.lr or benchmark.lr
    if network in SMALL:
        lr = settings.small_lr or lr / 5
    return [
        "optim.name=sgd",
        f"optim.lr={lr}",
        "optim.momentum=0.9",
        f"optim.nesterov={str(settings.nesterov).lower()}",
        f"optim.weight_decay={benchmark.weight_decay}",
        f"optim.decay_all={str(settings.decay_all).lower()}",
        "optim.warmup_epochs=0",
        "optim.schedule=step",
        f"optim.milestones={','.join(map(str, settings.milestones or benchmark.milestones))}",
        "optim.gamma=0.1",
        f"train.epochs={settings.epochs or benchmark.epochs}",
    ]


def _table(name: str, benchmark: Benchmark) -> str:
    """The numbered pairs, then one row of figures per method; the numbers head the columns."""
    lines = [f"{name}/METHOD/PAIR, published top-1 (%), and its source"]
    lines += [f"  {number:>2}  {pair}" for number, pair in enumerate(benchmark.pairs, 1)]
    lines.append(" " * 12 + "".join(f"{number:>6}" for number in range(1, len(benchmark.pairs) + 1)))
    shown = [name for name in benchmark.methods() if name in benchmark.settings or name in benchmark.figures]
    return "\n".join([*lines, *(_row(benchmark, method) for method in (*_SINGLE, *shown))])


def _row(benchmark: Benchmark, method: str) -> str:
    cells = []
    for pair in benchmark.pairs:
        figure = benchmark.figure(method, pair)
        none = "·" if method in _SINGLE or benchmark.offers(method, pair) else ""
        cells.append(f"{none:>6}" if figure is None else f"{figure:6.2f}")
    return f"{method:<12}{''.join(cells)}  {benchmark.authors.get(method, '')}".rstrip()


_USAGE = """\
·              no published figure of this recipe; an empty cell: the method does not fit the pair
teacher, alone train one network of a pair by itself: DATA/teacher/NETWORK, DATA/alone/NETWORK
METHOD+kd      adds kd with weight 1 to any CIFAR-100 method on features
kd+ls, dkd+ls  with logit standardisation

examples:
  drumline train cifar100/teacher/resnet56 --data.path cifar100 --run.name teacher
  drumline distill cifar100/dkd/resnet56-resnet20 --data.path cifar100 --distill.teacher_weights runs/teacher"""
