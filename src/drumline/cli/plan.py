"""`drumline plan --cuts MODEL`: where a model can be cut into stages.

Lists every module with which a stage may begin, with the times measured there and their spread. A split is printed as
the flags to paste, with the most it can gain, and is called not worth it where it is not. Options are checked before
torch is imported.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal

from drumline.cli.help import Command
from drumline.config.arguments import read_options
from drumline.config.limits import Range
from drumline.config.recipe import AutoInt, Precision
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


@dataclass(frozen=True)
class Options:
    """The options of `drumline plan`."""

    cuts: str = ""
    """The model: any value of model.name."""
    stages: Annotated[tuple[int, ...], Range(2, 4096)] = ()
    """Also choose where this many stages begin, by time, and print the flags to paste."""
    batch: Annotated[int, Range(1, 65536)] = 8
    """Images per micro-batch."""
    micro_batches: Annotated[AutoInt, Range(1, 65536)] = "auto"
    """Micro-batches per step, for the predicted speed-up. `auto`: four per stage."""
    size: Annotated[AutoInt, Range(1, 16384)] = "auto"
    """Side of the images in pixels. `auto`: the model's own, 32 for CIFAR networks, otherwise 224."""
    classes: Annotated[int, Range(1, 10**7)] = 1000
    """Outputs of the classifier."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure on."""
    precision: Precision = "auto"
    """As train.precision."""
    repeats: Annotated[int, Range(1, 1000)] = 9
    """Rounds to measure."""
    all: bool = False
    """List cuts inside blocks too, not only between them."""
    json: bool = False
    """Print only the result, as JSON."""


COMMAND = Command(
    name="plan",
    usage="--cuts MODEL [options]",
    about="""
        List where a model can be cut into pipeline stages, with measured times: the time
        before each cut, the unit that begins there (forward and backward time, activations
        kept, parameters) and what is sent to it. MODEL is any value of model.name:
        resnet50, cifar/vgg13, torchvision/NAME, timm/NAME, package.module:factory.

        Times are measured now, on this machine and device, and printed with their spread.
    """,
    options=Options,
    examples="""
  drumline plan --cuts resnet50 --stages 2 4
  drumline plan --cuts cifar/resnet56 --batch 32 --device cpu
""",
)


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


def main(argv: list[str]) -> int:
    """Measures and prints."""
    options = read(argv)
    measured, where = _measure(options)
    splits = [
        split(measured, stages, 4 * stages if options.micro_batches == "auto" else options.micro_batches)
        for stages in options.stages
    ]
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


def read(argv: list[str]) -> Options:
    """Reads the arguments; there must be a model."""
    if argv and not argv[0].startswith("-"):
        what = f"{argv[0]}: plan takes only options"
        raise UserError(what, f"for a model of that name: drumline plan --cuts {argv[0]}")
    options = read_options(argv, Options, "plan")
    if not options.cuts:
        raise UserError("plan needs a model", "for example drumline plan --cuts resnet50")
    return options


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


_WIDTH = 80
_COLUMNS = (6, 7, 7, 6, 8, 11, 12)


def _row(place: str, *cells: str) -> str:
    """A line of the table; a name too long for its column gets a line of its own."""
    row = "".join(f" {cell:>{width}}" for cell, width in zip(cells, _COLUMNS, strict=True))
    room = _WIDTH - len(row)
    return f"{place:<{room}}{row}" if len(place) <= room else f"{place}\n{'':<{room}}{row}"


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
    size = _own_size(options.cuts, model) if options.size == "auto" else options.size
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
