"""`drumline plan --cuts MODEL`: where a model can be cut into stages.

Lists every module with which a stage may begin, with the times measured there and their spread. A split is printed as
the flags to paste, with the most it can gain, and is called not worth it where it is not. Options are checked before
torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

from drumline.cli.help import Command
from drumline.config.arguments import read_options
from drumline.config.learning import AutoInt, PrecisionName
from drumline.config.limits import Range
from drumline.core.errors import UserError
from drumline.core.text import json_line, print_result

if TYPE_CHECKING:
    from torch import nn

    from drumline.parallel.pipeline.profile import Profile, ProfileOptions, UnitProfile


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
    precision: PrecisionName = "auto"
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
class Measurement:
    """The profile of a model, and what it was measured on."""

    profile: Profile
    device: str
    precision: str
    batch: int
    size: int
    returns: str
    """The type that the model returns in training. Only a Tensor can be trained as it is."""


@dataclass(frozen=True)
class StageSplit:
    """A model in a given number of stages, split by time and split evenly."""

    stages: int
    micro_batches: int
    names: tuple[str, ...]
    """Where each stage but the first begins."""
    shares: tuple[float, ...]
    """The fraction of the time that each stage takes."""
    balance: float
    """The time of the slowest stage over the mean."""
    speed_up: float
    """At most, over one device."""
    memory_bytes: tuple[int, ...]
    """Of each stage under 1F1B: activations in flight, parameters, gradients and momentum."""
    even_balance: float
    even_speed_up: float

    @property
    def flags(self) -> str:
        """The flags for `drumline train`."""
        return f"--parallel.layout pipeline --parallel.stages {self.stages} --parallel.split {','.join(self.names)}"


def main(argv: list[str]) -> int:
    """Measures and prints."""
    options = read(argv)
    measured = _measure(options)
    splits = [
        plan_split(
            measured.profile, stages, 4 * stages if options.micro_batches == "auto" else options.micro_batches
        )
        for stages in options.stages
    ]
    result = {
        "model": options.cuts,
        **{name: getattr(measured, name) for name in ("device", "precision", "batch", "size", "returns")},
        "noise": measured.profile.noise,
        "units": [asdict(unit) for unit in measured.profile.units],
        "splits": [{**asdict(found), "flags": found.flags} for found in splits],
    }
    if options.json:
        print(json_line(result))
        return 0
    for line in describe(options, measured):
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


def plan_split(measured: Profile, stages: int, micro_batches: int) -> StageSplit:
    """The split by time, compared with the even one."""
    from drumline.parallel.pipeline.split import balance, even_split, speed_up, stage_times, time_split

    names = [unit.name for unit in measured.units]
    chosen = time_split(measured, stages)
    by_time, by_count = tuple(names.index(name) for name in chosen), even_split(len(names), stages)
    times = measured.times
    total = sum(times) or 1.0
    edges = pairwise((0, *by_time, len(names)))
    return StageSplit(
        stages=stages,
        micro_batches=micro_batches,
        names=chosen,
        shares=tuple(time / total for time in stage_times(times, by_time)),
        balance=balance(times, by_time),
        speed_up=speed_up(times, by_time, micro_batches),
        memory_bytes=tuple(
            _stage_memory(measured.units[first:last], min(micro_batches, stages - stage))
            for stage, (first, last) in enumerate(edges)
        ),
        even_balance=balance(times, by_count),
        even_speed_up=speed_up(times, by_count, micro_batches),
    )


def describe(options: Options, measured: Measurement) -> list[str]:
    """The table of units, 80 columns wide, under lines of at most 100. Pure."""
    units, total = measured.profile.units, sum(measured.profile.times)
    noise = f"spread of {options.repeats} rounds: {100 * measured.profile.noise:.1f} %"
    lines = [
        f"{options.cuts}: {len(units)} units, each of which may begin a stage",
        f"{measured.batch} images of {measured.size} x {measured.size}, {measured.precision}, on {measured.device}: "
        f"{1000 * total:.1f} ms forward and backward",
        measured.profile.noisy or noise,
    ]
    if measured.returns != "Tensor":
        lines.append(
            f"in training it returns {measured.returns}: to train it, wrap it in a factory that returns the logits"
        )
    lines += [
        "",
        _row(
            "stage begins at", "before", "fwd ms", "bwd ms", "share", "kept MiB", "parameters", "crosses KiB"
        ),
    ]
    before = 0.0
    for unit in units:
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


def describe_split(found: StageSplit) -> list[str]:
    """What to paste, how even the split is, and what it can gain. Pure."""
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


def _row(name: str, *cells: str) -> str:
    """A line of the table. A name too long for its column gets a line of its own."""
    row = "".join(f" {cell:>{width}}" for cell, width in zip(cells, _COLUMNS, strict=True))
    room = _WIDTH - len(row)
    return f"{name:<{room}}{row}" if len(name) <= room else f"{name}\n{'':<{room}}{row}"


def _stage_memory(units: Sequence[UnitProfile], in_flight: int) -> int:
    """Bytes of a stage of these units: the activations of the micro-batches in flight, which under 1F1B are at most
    S - s in stage s of S, and three copies of each parameter (itself, gradient, momentum)."""
    return sum(in_flight * unit.activation_bytes + 3 * unit.parameter_bytes for unit in units)


def _measure(options: Options) -> Measurement:
    """Builds the model and measures the units between its cut points."""
    import torch

    from drumline.models.registry import create_model, usual_size
    from drumline.parallel.pipeline.cut import cut_points, trace
    from drumline.parallel.pipeline.profile import profile
    from drumline.parallel.pipeline.split import check_stage_count, trainable_units

    measuring = _profile_options(options)
    torch.manual_seed(0)
    model = create_model(options.cuts, options.classes).train()
    if measuring.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    size = usual_size(options.cuts, model) if options.size == "auto" else options.size
    measuring = replace(measuring, shape=(options.batch, 3, size, size))
    _check_size(options.cuts, model, size)
    traced = trace(model, sample=torch.empty(measuring.shape))
    points = trainable_units(traced, cut_points(traced, inside_blocks=options.all))
    check_stage_count(options.cuts, len(points), max(options.stages, default=1))
    try:
        measured = profile(traced, measuring, points)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{options.batch} images of {size} x {size} do not fit into the GPU's memory",
            f"set --batch to less than {options.batch}",
        ) from error
    device = measuring.device
    return Measurement(
        measured,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        precision=measuring.precision.name,
        batch=options.batch,
        size=size,
        returns=traced.records[True].returns,
    )


def _profile_options(options: Options) -> ProfileOptions:
    """How to measure, but for the shape of the images: device, precision, repeats."""
    import torch

    from drumline.config.recipe import Recipe
    from drumline.core.precision import resolve_precision
    from drumline.core.progress import progress
    from drumline.parallel.pipeline.profile import ProfileOptions
    from drumline.parallel.process_group import pick_device, resolve_device_type
    from drumline.parallel.strategy import uses_channels_last

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU", "see `drumline doctor`, or use --device cpu")
    device = pick_device(resolve_device_type(options.device), 0)
    return ProfileOptions(
        (),
        device,
        resolve_precision(options.precision, device, field="--precision"),
        uses_channels_last(Recipe(), device),
        options.repeats,
        lambda rounds: progress(rounds, f"timing {options.cuts}", len(rounds)),
    )


def _check_size(name: str, model: nn.Module, size: int) -> None:
    """Runs the model once on the CPU: its own error is clearer than that of a single unit."""
    import torch

    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, 3, size, size))
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"{name} cannot take images of {size} x {size}: {type(error).__name__}: {reason}",
            "use a different --size",
        ) from error
    finally:
        model.train()
