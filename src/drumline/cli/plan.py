"""`drumline plan --cuts MODEL`: its words, its help, and what it prints.

Promises: every place where a stage may begin is listed with what was measured there, on the device in question and
with the spread of the measurement; a split is given as the flags to paste, with what it can gain at most, and
plainly called not worth it where it is not. Refuses unknown flags and values before torch is imported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from drumline.config.toml import together
from drumline.core.errors import UserError
from drumline.core.result import json_line, print_result
from drumline.parallel.pipeline.split import (
    Memory,
    balance,
    check_stage_count,
    even_split,
    speed_up,
    stage_times,
)

if TYPE_CHECKING:
    from torch import nn

    from drumline.parallel.pipeline.profile import Profile

HELP = """usage: drumline plan --cuts MODEL [--flags]

List where a model can be cut into pipeline stages, with measured times: what lies before each place, the unit that
begins there (time forward and backward, activations kept, parameters) and what crosses into it. MODEL is any name
that --model.name takes: resnet50, cifar/vgg13, torchvision/NAME, timm/NAME, package.module:factory.

flags:
  --stages 2 4         also choose where so many stages begin, by time, and print the flags to paste
  --batch 8            images in one micro-batch
  --micro-batches auto micro-batches of a step, for the predicted speed-up; auto: four for each stage
  --size auto          pixels of a side; auto: the model's own, 32 for CIFAR networks, else 224
  --classes 1000
  --device auto        auto, cpu or cuda
  --precision auto     as --train.precision: auto, fp32, bf16, fp16
  --repeats 9          rounds that are measured
  --all                places inside blocks too, not only between them
  --json               print the result as JSON only

Times are of this machine and device, measured now; the spread of the rounds is printed with them.

examples:
  drumline plan --cuts resnet50 --stages 2 4
  drumline plan --cuts cifar/resnet56 --batch 32 --device cpu
"""


@dataclass(frozen=True)
class Options:
    """What the words ask for."""

    cuts: str
    stages: tuple[int, ...] = ()
    batch: int = 8
    micro_batches: int = 0
    """0: four for each stage, as `parallel.micro_batches = auto`."""
    size: int = 0
    """0: the model's own."""
    classes: int = 1000
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    repeats: int = 9
    all: bool = False
    json: bool = False


@dataclass(frozen=True)
class StageSplit:
    """A model in so many stages, by time and by count."""

    stages: int
    micro_batches: int
    names: tuple[str, ...]
    """Where each stage but the first begins."""
    shares: tuple[float, ...]
    """Of the time, for each stage."""
    balance: float
    """The slowest stage's time over the mean."""
    speed_up: float
    """Over one device, at most: crossings cost nothing here."""
    memory_bytes: tuple[int, ...]
    """Of each stage under 1F1B: activations in flight, and parameters, gradients and momentum."""
    even_names: tuple[str, ...]
    even_balance: float
    even_speed_up: float

    @property
    def flags(self) -> str:
        """To paste behind `drumline train`."""
        return f"--parallel.layout pipeline --parallel.stages {self.stages} --parallel.split {','.join(self.names)}"


def plan(words: list[str]) -> int:
    """Reads the words after `drumline plan`, measures, and prints."""
    if "-h" in words or "--help" in words:
        print(HELP, end="")
        return 0
    options = read(words)
    measured, where = _measure(options)
    splits = [split(measured, stages, options.micro_batches or 4 * stages) for stages in options.stages]
    result = {
        "model": options.cuts,
        **where,
        "noise": measured.noise,
        "units": [asdict(unit) for unit in measured.units],
        "splits": [{**asdict(found), "flags": found.flags} for found in splits],
    }
    if options.json:
        print(json_line(result))
        return 0
    for line in describe(options, measured, where):
        print(line)
    for found in splits:
        print()
        for line in describe_split(found):
            print(line)
    print_result(result)
    return 0


def split(measured: Profile, stages: int, micro_batches: int) -> StageSplit:
    """The chosen split and the even one. Pure."""
    from drumline.parallel.pipeline.profile import time_split

    names = [unit.name for unit in measured.units]
    chosen = time_split(measured, stages)
    by_time, by_count = tuple(names.index(name) for name in chosen), even_split(len(names), stages)
    times = measured.times
    total = sum(times) or 1.0
    memory = Memory(
        [unit.activation_bytes for unit in measured.units],
        [unit.parameter_bytes for unit in measured.units],
        micro_batches,
        limit=0,
    )
    edges = pairwise((0, *by_time, len(names)))
    return StageSplit(
        stages=stages,
        micro_batches=micro_batches,
        names=chosen,
        shares=tuple(time / total for time in stage_times(times, by_time)),
        balance=balance(times, by_time),
        speed_up=speed_up(times, by_time, micro_batches),
        memory_bytes=tuple(
            memory.of(stage, stages, first, last) for stage, (first, last) in enumerate(edges)
        ),
        even_names=tuple(names[first] for first in by_count),
        even_balance=balance(times, by_count),
        even_speed_up=speed_up(times, by_count, micro_batches),
    )


def describe(options: Options, measured: Profile, where: dict[str, Any]) -> list[str]:
    """The table of places, 80 columns wide, and lines of at most 100. Pure."""
    total = sum(measured.times)
    lines = [
        f"{options.cuts}: {len(measured.units)} units, each of which may begin a stage",
        f"{where['batch']} images of {where['size']} x {where['size']}, {where['precision']}, on {where['device']}: "
        f"{1000 * total:.1f} ms forward and backward",
        measured.noisy or f"spread of {options.repeats} rounds: {100 * measured.noise:.1f} %",
        *_unfit(where["returns"]),
        "",
        _row(
            "stage begins at", "before", "fwd ms", "bwd ms", "share", "kept MiB", "parameters", "crosses KiB"
        ),
    ]
    before = 0.0
    for unit in measured.units:
        row = _row(
            unit.name or "(the beginning)",
            f"{100 * before / total:.0f} %",
            f"{1000 * unit.forward_s:.2f}",
            f"{1000 * unit.backward_s:.2f}",
            f"{100 * unit.seconds / total:.1f} %",
            f"{unit.activation_bytes / 2**20:,.1f}",
            f"{unit.parameters:,}",
            f"{unit.crossing_bytes / 1024:,.0f} ({unit.crossing_tensors})" if unit.crossing_tensors else "-",
        )
        lines += row.splitlines()
        before += unit.seconds
    return lines


def _unfit(returns: str) -> list[str]:
    """What keeps the model from being trained as it is."""
    if returns == "Tensor":
        return []
    return [f"in training it returns {returns}: to train it, wrap it in a factory that returns the logits"]


def describe_split(found: StageSplit) -> list[str]:
    """A split in words: what to paste, how even it is, what it can gain. Pure."""
    stages, micro_batches = found.stages, found.micro_batches
    ideal = stages / (1 + (stages - 1) / micro_batches)
    shares = " ".join(f"{100 * share:.0f}" for share in found.shares)
    memory = " ".join(f"{size / 2**20:,.{0 if size >= 10 * 2**20 else 1}f}" for size in found.memory_bytes)
    lines = [
        f"{stages} stages: {found.flags}",
        f"  split time: {shares} % of the time; the slowest takes {found.balance:.2f} x the mean; "
        f"at most {found.speed_up:.2f} x one device",
        f"  split even: the slowest takes {found.even_balance:.2f} x the mean; at most {found.even_speed_up:.2f} x",
        f"  equal stages would reach {ideal:.2f} x, with {micro_batches} micro-batches; crossings are not counted",
        f"  memory of the stages (1f1b, SGD): {memory} MiB",
    ]
    if found.speed_up >= stages / 2:
        return lines
    if found.speed_up >= 0.8 * ideal:
        why = f"{micro_batches} micro-batches leave the stages idle too often; use more of them, or fewer stages"
    else:
        slowest = max(range(stages), key=lambda stage: found.shares[stage])
        why = f"stage {slowest + 1} alone holds {100 * found.shares[slowest]:.0f} % of the time; use fewer stages"
    return [*lines, f"  not worth it: {stages} devices, less than {stages / 2:g} x the speed. {why}"]


def read(words: Sequence[str]) -> Options:
    """The words after `drumline plan`; every mistake is told at once."""
    values: dict[str, Any] = {}
    mistakes: list[UserError] = []
    waiting = deque(words)
    while waiting:
        try:
            name, value = _flag(waiting.popleft(), waiting)
            values[name] = value
        except UserError as mistake:
            mistakes.append(mistake)
    if "cuts" not in values and not mistakes:
        mistakes.append(UserError("plan needs a model", "for example drumline plan --cuts resnet50"))
    if mistakes:
        raise together(mistakes)
    return Options(**values)


_WIDTH = 80
_COLUMNS = (6, 7, 7, 6, 8, 11, 12)
_LARGEST = {"batch": 65536, "micro_batches": 65536, "size": 16384, "classes": 10**7, "repeats": 1000}
_CHOICES = {"device": ("auto", "cpu", "cuda"), "precision": ("auto", "fp32", "bf16", "fp16")}
_EXAMPLES = {
    "cuts": "resnet50",
    "stages": "2 4",
    "batch": "8",
    "micro_batches": "8",
    "size": "224",
    "classes": "1000",
    "device": "cpu",
    "precision": "fp32",
    "repeats": "9",
}
_SWITCHES = ("all", "json")


def _row(place: str, *cells: str) -> str:
    """A line of the table; a name too long for its column gets a line of its own."""
    row = "".join(f" {cell:>{width}}" for cell, width in zip(cells, _COLUMNS, strict=True))
    room = _WIDTH - len(row)
    return f"{place:<{room}}{row}" if len(place) <= room else f"{place}\n{'':<{room}}{row}"


def _flag(word: str, waiting: deque[str]) -> tuple[str, Any]:
    spelled, equals, text = word.partition("=")
    name = spelled.removeprefix("--").replace("-", "_")
    if not spelled.startswith("--"):
        raise UserError(
            f"{word}: plan takes flags only", f"for a model of that name: drumline plan --cuts {word}"
        )
    if name not in (*_EXAMPLES, *_SWITCHES):
        near = get_close_matches(name, (*_EXAMPLES, *_SWITCHES), n=1)
        fix = f"did you mean --{near[0].replace('_', '-')}?" if near else "see `drumline plan --help`"
        while waiting and not waiting[0].startswith("-"):
            waiting.popleft()  # its value: no second mistake
        raise UserError(f"{spelled}: plan has no such flag", fix)
    if name in _SWITCHES:
        if equals:
            raise UserError(f"{word}: takes no value", f"write {spelled}, or leave it out")
        return name, True
    if not equals:
        if not waiting or waiting[0].startswith("--"):
            raise UserError(f"{spelled}: needs a value", f"for example {spelled} {_EXAMPLES[name]}")
        text = waiting.popleft()
        while name == "stages" and waiting and not waiting[0].startswith("-"):
            text += f" {waiting.popleft()}"
    return name, _value(name, text, spelled)


def _value(name: str, text: str, spelled: str) -> Any:
    if name == "cuts":
        return text
    fix = f"for example {spelled} {_EXAMPLES[name]}"
    if name in _CHOICES:
        if text not in _CHOICES[name]:
            raise UserError(f"{spelled} {text}: expected one of {', '.join(_CHOICES[name])}", fix)
        return text
    if name == "stages":
        numbers = text.replace(",", " ").split()
        if not numbers or not all(_is_count(number, 2, 4096) for number in numbers):
            raise UserError(f"{spelled} {text}: expected whole numbers from 2 on", fix)
        return tuple(int(number) for number in numbers)
    if text == "auto" and name in ("size", "micro_batches"):
        return 0
    if not _is_count(text, 1, _LARGEST[name]):
        raise UserError(f"{spelled} {text}: expected a whole number from 1 to {_LARGEST[name]}", fix)
    return int(text)


def _is_count(text: str, least: int, most: int) -> bool:
    return text.isascii() and text.isdigit() and least <= int(text[:9]) <= most


def _measure(options: Options) -> tuple[Profile, dict[str, Any]]:
    """Builds the model, cuts and measures it; the profile, and on what it was taken."""
    import torch

    from drumline.config.recipe import Recipe
    from drumline.core.progress import progress
    from drumline.models.registry import create_model
    from drumline.parallel.pipeline.cut import trace, trainable_units
    from drumline.parallel.pipeline.profile import cut_points, profile
    from drumline.parallel.process_group import pick_device, resolve_device_type
    from drumline.parallel.world import single_process
    from drumline.train import prepare

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU", "see `drumline doctor`, or use --device cpu")
    world = single_process(pick_device(resolve_device_type(options.device), 0))
    if options.precision == "fp16" and world.device.type == "cpu":
        raise UserError("--precision fp16: needs a GPU", "use bf16 or fp32 on a CPU")
    recipe = Recipe()
    recipe = replace(recipe, train=replace(recipe.train, precision=options.precision))
    autocast, dense = prepare.precision(recipe, world), not prepare.channels_last(recipe, world)
    torch.manual_seed(0)
    model = create_model(options.cuts, options.classes).train()
    if not dense:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    size = options.size or _own_size(options.cuts, model)
    shape = (options.batch, 3, size, size)
    _try(options.cuts, model, size)
    traced = trace(model, sample=torch.empty(shape))
    points = trainable_units(traced, cut_points(traced, inside_blocks=options.all), model)
    check_stage_count(options.cuts, len(points), max(options.stages, default=1))
    try:
        measured = profile(
            traced,
            model,
            shape,
            world.device,
            autocast,
            options.repeats,
            lambda rounds: progress(rounds, f"timing {options.cuts}", len(rounds)),
            channels_last=not dense,
            points=points,
        )
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{options.batch} images of {size} x {size} do not fit into the GPU's memory",
            f"give a smaller --batch than {options.batch}",
        ) from error
    return measured, {
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "precision": {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[autocast],
        "batch": options.batch,
        "size": size,
        "returns": traced.records[True].returns,
    }


def _try(name: str, model: nn.Module, size: int) -> None:
    """Whether the model takes such images at all; by itself it says so more plainly than in parts."""
    import torch

    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, 3, size, size))
    except UserError:
        raise
    except Exception as error:
        told = str(error).strip().splitlines() or [""]
        raise UserError(
            f"{name} cannot take images of {size} x {size}: {type(error).__name__}: {told[0]}",
            "give another --size",
        ) from error
    finally:
        model.train()


def _own_size(name: str, model: nn.Module) -> int:
    """Pixels of a side that the model is usually given."""
    from drumline.models.registry import IMAGENET, model_names

    published = getattr(model, "pretrained_cfg", None)  # timm's
    size = published.get("input_size") if isinstance(published, dict) else None
    if size:
        return int(size[-1])
    return 32 if name in model_names() and name not in IMAGENET else 224
