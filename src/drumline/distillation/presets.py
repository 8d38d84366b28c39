"""Published recipes by name: `cifar100/dkd/resnet56-resnet20` stands for the arguments that set its fields.

Promises: `preset_arguments` returns `section.key=value` arguments as a user would type them, computed from three
tables (pairs, methods, figures). Every name in `preset_names` has them. A figure is the top-1 accuracy that the
authors reported. If a method's authors gave no weight for a pair, the method's usual weight applies. Rejects an
unknown name and suggests similar ones.

Sources: RepDistiller (the CIFAR schedule and the weights of its methods), mdistiller (dkd, ofd, kdsvd, reviewkd's
schedule, ImageNet), ReviewKD, DIST, and the logs of logit standardisation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from drumline.core.errors import UserError
from drumline.core.text import either


def preset_arguments(name: str) -> list[str]:
    """The recipe that `name` stands for, without the paths of the data and of the teacher's weights."""
    benchmark, kind, networks = _parse(name)
    if kind in _SINGLE:
        single = _schedule(
            benchmark, networks, benchmark.single_epochs, benchmark.single_milestones, plain=True
        )
        return [*benchmark.data, f"model.name={_model(benchmark, networks)}", *single]
    teacher, student = networks.split("-")
    settings = benchmark.settings_for(kind, networks)
    argv = [*benchmark.data, f"model.name={_model(benchmark, student)}"]
    argv += [f"distill.teacher={_model(benchmark, teacher)}", f"distill.method={kind.partition('+')[0]}"]
    argv += [f"distill.r={settings.r}", f"distill.a={settings.a}"]
    argv += [f"distill.b={settings.b}"] if settings.b is not None else []
    argv += [f"distill.T={settings.T}"]
    argv += ["distill.standardise=true"] if settings.standardise else []
    argv += [f"distill.options={','.join(settings.options)}"] if settings.options else []
    return argv + _schedule(benchmark, student, benchmark.epochs, benchmark.milestones, plain=settings.plain)


@cache
def preset_names() -> tuple[str, ...]:
    """Every preset, ordered by data set, method and pair."""
    found = []
    for name, benchmark in _BENCHMARKS.items():
        for kind, end in _SINGLE.items():
            networks = dict.fromkeys(pair.split("-")[end] for pair in benchmark.pairs)
            found += [f"{name}/{kind}/{network}" for network in networks]
        for method in benchmark.methods():
            found += [f"{name}/{method}/{pair}" for pair in benchmark.pairs if benchmark.offers(method, pair)]
    return tuple(found)


def is_preset(argument: str) -> bool:
    """Whether an argument names a preset rather than a file, a folder or an assignment."""
    named = argument.startswith(tuple(f"{name}/" for name in _BENCHMARKS))
    return named and "=" not in argument and not argument.endswith(".toml") and not Path(argument).exists()


def published(name: str) -> float | None:
    """The top-1 accuracy in percent that the authors report, or None."""
    benchmark, kind, networks = _parse(name)
    if kind in _SINGLE:
        ends = [pair.split("-")[_SINGLE[kind]] for pair in benchmark.pairs]
        return benchmark.figures[kind][ends.index(networks)]
    return benchmark.figure(kind, networks)


def listing() -> str:
    """The output of `drumline distill --presets`: a table per data set, then how to use a preset."""
    return "\n\n".join([*(_table(name, benchmark) for name, benchmark in _BENCHMARKS.items()), _USAGE])


@dataclass(frozen=True)
class _Settings:
    """The weights of a method: r·(labels) + a·kd + b·method. `b` is None for kd itself, whose weight is `a`."""

    r: float = 1.0
    a: float = 0.0
    b: float | None = 1.0
    T: float = 4.0
    standardise: bool = False
    options: tuple[str, ...] = ()
    plain: bool = True
    """True: plain momentum, and weight decay for every parameter. False: Nesterov momentum, and no decay for biases
    and normalisation layers."""


@dataclass(frozen=True)
class _Benchmark:
    """A data set with its pairs, its recipe, and its figures in the order of the pairs."""

    data: tuple[str, ...]
    pairs: tuple[str, ...]
    settings: Mapping[str, _Settings]
    figures: Mapping[str, tuple[float | None, ...]]
    epochs: int
    milestones: tuple[int, ...]
    lr: float
    weight_decay: float
    single_epochs: int
    single_milestones: tuple[int, ...]
    with_kd: bool
    """Whether `METHOD+kd` is offered."""
    deviations: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """Settings of a method that differ for one pair."""

    def methods(self) -> tuple[str, ...]:
        joined = [
            f"{name}+kd" for name in self.settings if self.with_kd and name.partition("+")[0] not in _LOGITS
        ]
        return (*self.settings, *joined)

    def offers(self, method: str, pair: str) -> bool:
        """Whether the method fits the pair. fsp and kdsvd need stages of equal widths; a published figure of fsp
        shows that the pair has them."""
        return method.removesuffix("+kd") not in ("fsp", "kdsvd") or self.figure("fsp", pair) is not None

    def settings_for(self, method: str, pair: str) -> _Settings:
        alone = method.removesuffix("+kd")
        settings = replace(self.settings[alone], **self.deviations.get((alone, pair), {}))
        return replace(settings, a=1.0) if alone != method else settings

    def figure(self, method: str, pair: str) -> float | None:
        row = self.figures.get(method)
        return row[self.pairs.index(pair)] if row else None


def _rows(text: str) -> dict[str, tuple[float | None, ...]]:
    """Parses a table of figures: a name, then a number per pair, `-` for none."""
    lines = [line.split() for line in text.strip().splitlines()]
    return {name: tuple(None if cell == "-" else float(cell) for cell in cells) for name, *cells in lines}


_SINGLE = {"teacher": 0, "alone": 1}
"""Recipes without distillation, and the network of a pair that they train."""
_LOGITS = ("kd", "dkd", "dist")
"""Methods that replace kd, so that kd is not added to them."""
_SMALL = ("mobilenet_v2_half", "shufflenet_v1", "shufflenet_v2")
"""Networks that the literature trains with a fifth of the learning rate."""
_TAKEN = ("vgg13", "resnet50")
"""CIFAR networks whose plain name belongs to an ImageNet network."""

_CIFAR_PAIRS = (
    "wrn_40_2-wrn_16_2",
    "wrn_40_2-wrn_40_1",
    "resnet56-resnet20",
    "resnet110-resnet20",
    "resnet110-resnet32",
    "resnet32x4-resnet8x4",
    "vgg13-vgg8",
    "vgg13-mobilenet_v2_half",
    "resnet50-mobilenet_v2_half",
    "resnet50-vgg8",
    "resnet32x4-shufflenet_v1",
    "resnet32x4-shufflenet_v2",
    "wrn_40_2-shufflenet_v1",
)

_CIFAR_SETTINGS = {
    "kd": _Settings(r=0.1, a=0.9, b=None),
    "kd+ls": _Settings(r=0.1, a=9.0, b=None, T=2.0, standardise=True),
    "dkd": _Settings(options=("beta=8.0", "warmup=20")),
    "dist": _Settings(b=2.0),
    "hint": _Settings(b=100.0),
    "attention": _Settings(b=1000.0),
    "similarity": _Settings(b=3000.0),
    "correlation": _Settings(b=0.02),
    "vid": _Settings(),
    "rkd": _Settings(),
    "pkt": _Settings(b=30000.0),
    "crd": _Settings(b=0.8),
    "reviewkd": _Settings(b=5.0, options=("warmup=20",)),
    "ofd": _Settings(b=0.001),
    # The authors' loss and weight. The figures come from RepDistiller's variant: other normalisation, weight 200.
    "factor": _Settings(b=500.0),
    "nst": _Settings(b=50.0),
    "kdsvd": _Settings(),
    "fsp": _Settings(),
    "abound": _Settings(),
}

_BETA_2, _BETA_6 = ({"options": (f"beta={beta}", "warmup=20")} for beta in (2.0, 6.0))
_CIFAR_DEVIATIONS: dict[tuple[str, str], Mapping[str, Any]] = {
    ("dkd", "wrn_40_2-wrn_16_2"): _BETA_6,
    ("dkd", "wrn_40_2-wrn_40_1"): _BETA_6,
    ("dkd", "resnet56-resnet20"): _BETA_2,
    ("dkd", "resnet110-resnet20"): _BETA_2,
    ("dkd", "resnet110-resnet32"): _BETA_2,
    ("dkd", "vgg13-vgg8"): _BETA_6,
    ("dkd", "vgg13-mobilenet_v2_half"): _BETA_6,
    # The names of the logs that the figures come from contain temperature and weight.
    ("kd+ls", "resnet110-resnet20"): {"T": 4.0, "a": 12.0},
    ("kd+ls", "vgg13-vgg8"): {"T": 3.0},
    ("kd+ls", "vgg13-mobilenet_v2_half"): {"T": 3.0},
    ("kd+ls", "resnet50-mobilenet_v2_half"): {"T": 3.0, "a": 1.0},
    ("reviewkd", "resnet56-resnet20"): {"b": 0.6},
    ("reviewkd", "resnet110-resnet20"): {"b": 1.0},
    ("reviewkd", "resnet110-resnet32"): {"b": 1.0},
    ("reviewkd", "resnet32x4-shufflenet_v2"): {"b": 8.0},
}

_CIFAR_FIGURES = """
teacher     75.61 75.61 72.34 74.31 74.31 79.42 74.64 74.64 79.34 79.34 79.42 79.42 75.61
alone       73.26 71.98 69.06 69.06 71.14 72.50 70.36 64.60 64.60 70.36 70.50 71.82 70.50
kd          74.92 73.54 70.66 70.67 73.08 73.33 72.98 67.37 67.35 73.81 74.07 74.45 74.83
kd+ls       76.11 74.37 71.43 71.48 74.17 76.62 74.36 68.61 69.02 -     -     75.56 -
dkd         76.24 74.81 71.97 71.06 74.11 76.32 74.68 69.71 70.35 -     76.45 77.07 76.70
dist        -     74.43 71.75 -     -     76.31 -     -     68.66 -     76.34 77.35 -
hint        73.58 72.24 69.21 68.99 71.06 73.50 71.02 64.14 63.16 70.69 73.59 73.54 73.73
attention   74.08 72.77 70.55 70.22 72.31 73.44 71.43 59.40 58.58 71.84 71.73 72.73 73.32
similarity  73.83 72.43 69.67 70.04 72.69 72.94 72.68 66.30 68.08 73.34 73.48 74.56 74.52
correlation 73.56 72.21 69.63 69.48 71.48 72.97 70.71 64.86 65.43 70.25 71.14 71.29 71.38
vid         74.11 73.30 70.38 70.16 72.61 73.09 71.23 65.56 67.57 70.30 73.38 73.40 73.61
rkd         73.35 72.22 69.61 69.25 71.82 71.90 71.48 64.52 64.43 71.50 72.28 73.21 72.21
pkt         74.54 73.45 70.34 70.25 72.61 73.64 72.88 67.13 66.52 73.01 74.10 74.69 73.89
crd         75.48 74.14 71.16 71.46 73.48 75.51 73.94 69.73 69.11 74.30 75.11 75.65 76.05
crd+kd      75.64 74.38 71.63 71.56 73.75 75.46 74.29 69.94 69.54 74.58 75.12 76.05 76.27
reviewkd    -     -     -     -     -     75.63 74.84 -     -     -     -     77.78 -
factor      73.25 71.59 69.84 70.22 72.37 72.86 70.58 61.78 60.99 70.29 71.75 72.50 72.03
nst         73.68 72.24 69.60 69.53 71.96 73.30 71.53 58.16 64.96 71.28 74.12 74.68 74.89
fsp         72.91 -     69.95 70.11 71.89 72.62 70.23 -     -     -     -     -     -
abound      72.50 72.38 69.47 69.53 70.98 73.17 70.94 66.06 67.20 70.65 73.55 74.31 73.34
"""

_IMAGENET_SETTINGS = {
    "kd": _Settings(r=0.5, a=0.5, b=None, T=1.0),
    # r is from the authors' configuration, a and T from the log beside it; with a = 9 others report 71.23.
    "kd+ls": _Settings(a=6.0, b=None, T=2.0, standardise=True),
    "dkd": _Settings(T=1.0, options=("beta=0.5", "warmup=1")),
    "dist": _Settings(b=2.0, T=1.0, plain=False),
    "attention": _Settings(b=1000.0, options=("layers=3+4",)),
    "crd": _Settings(b=0.8),
    "reviewkd": _Settings(options=("warmup=1", "preact=true")),
}

_IMAGENET_FIGURES = """
teacher   73.31
alone     69.75
kd        71.03
kd+ls     71.42
dkd       71.70
dist      72.07
attention 70.70
crd       71.17
reviewkd  71.61
"""

_BENCHMARKS = {
    "cifar100": _Benchmark(
        data=("data.source=cifar100", "data.batch=64", "data.augment=shift-flip"),
        pairs=_CIFAR_PAIRS,
        settings=_CIFAR_SETTINGS,
        figures=_rows(_CIFAR_FIGURES),
        epochs=240,
        milestones=(150, 180, 210),
        lr=0.05,
        weight_decay=0.0005,
        single_epochs=240,
        single_milestones=(150, 180, 210),
        with_kd=True,
        deviations=_CIFAR_DEVIATIONS,
    ),
    "imagenet": _Benchmark(
        data=("data.batch=256", "data.augment=crop-flip"),
        pairs=("resnet34-resnet18",),
        settings=_IMAGENET_SETTINGS,
        figures=_rows(_IMAGENET_FIGURES),
        epochs=100,
        milestones=(30, 60, 90),
        lr=0.1,
        weight_decay=0.0001,
        # The figures are those of torchvision's weights, which were trained for 90 epochs.
        single_epochs=90,
        single_milestones=(30, 60),
        with_kd=False,
    ),
}

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


def _parse(name: str) -> tuple[_Benchmark, str, str]:
    """Benchmark, method, and pair or network of a preset."""
    if name not in preset_names():
        raise UserError(f"there is no preset {name!r}", fix=_fix(name))
    start, kind, networks = name.split("/")
    return _BENCHMARKS[start], kind, networks


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


def _model(benchmark: _Benchmark, network: str) -> str:
    return f"cifar/{network}" if benchmark is _BENCHMARKS["cifar100"] and network in _TAKEN else network


def _schedule(
    benchmark: _Benchmark, network: str, epochs: int, milestones: tuple[int, ...], plain: bool
) -> list[str]:
    return [
        "optim.name=sgd",
        f"optim.lr={benchmark.lr / 5 if network in _SMALL else benchmark.lr}",
        "optim.momentum=0.9",
        f"optim.nesterov={str(not plain).lower()}",
        f"optim.weight_decay={benchmark.weight_decay}",
        f"optim.decay_all={str(plain).lower()}",
        "optim.schedule=step",
        f"optim.milestones={','.join(map(str, milestones))}",
        "optim.gamma=0.1",
        f"train.epochs={epochs}",
    ]


def _table(name: str, benchmark: _Benchmark) -> str:
    """The numbered pairs, then one row of figures per method; the numbers head the columns."""
    lines = [f"{name}/METHOD/PAIR, top-1 (%) as published"]
    lines += [f"  {number:>2}  {pair}" for number, pair in enumerate(benchmark.pairs, 1)]
    lines.append(" " * 12 + "".join(f"{number:>6}" for number in range(1, len(benchmark.pairs) + 1)))
    shown = [name for name in benchmark.methods() if name in benchmark.settings or name in benchmark.figures]
    return "\n".join([*lines, *(_row(benchmark, method) for method in (*_SINGLE, *shown))])


def _row(benchmark: _Benchmark, method: str) -> str:
    cells = []
    for pair in benchmark.pairs:
        figure = benchmark.figure(method, pair)
        none = "·" if method in _SINGLE or benchmark.offers(method, pair) else ""
        cells.append(f"{none:>6}" if figure is None else f"{figure:6.2f}")
    return f"{method:<12}{''.join(cells)}".rstrip()


_USAGE = """\
·              no published figure; an empty cell: the method does not fit the pair
teacher, alone train one network of a pair by itself: DATA/teacher/NETWORK, DATA/alone/NETWORK
METHOD+kd      adds kd with weight 1 to any CIFAR-100 method except kd, dkd and dist
kd+ls          kd with logit standardisation

examples:
  drumline train cifar100/teacher/resnet56 --data.path cifar100 --run.name teacher
  drumline distill cifar100/dkd/resnet56-resnet20 --data.path cifar100 --distill.teacher_weights runs/teacher"""
