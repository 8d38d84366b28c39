"""`drumline plan --cuts MODEL`: where a model can be cut into stages.

Lists every module with which a stage may begin, with the times measured there and their spread. A split is printed as
the flags to paste, with the most it can gain, and is called not worth it where it is not. Options are checked before
torch is imported.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from drumline.cli.help import Command
from drumline.config.arguments import read_options
from drumline.config.limits import Range
from drumline.config.recipe import AutoInt, PrecisionName
from drumline.core.errors import UserError
from drumline.core.text import json_line, print_result

if TYPE_CHECKING:
    from drumline.parallel.pipeline.split import Measurement, StageSplit


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


def main(argv: list[str]) -> int:
    """Measures and prints."""
    options = read(argv)
    measured = _measure(options)

    from drumline.parallel.pipeline.split import plan_split

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


def _measure(options: Options) -> Measurement:
    """Resolves device and precision, and measures."""
    import torch

    from drumline.config.recipe import Recipe
    from drumline.core.precision import resolve_precision
    from drumline.core.progress import progress
    from drumline.parallel.pipeline.profile import ProfileOptions
    from drumline.parallel.pipeline.split import measure_cuts
    from drumline.parallel.process_group import pick_device, resolve_device_type
    from drumline.parallel.strategy import uses_channels_last
    from drumline.parallel.world import single_process

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU", "see `drumline doctor`, or use --device cpu")
    world = single_process(pick_device(resolve_device_type(options.device), 0))
    return measure_cuts(
        options.cuts,
        options.classes,
        options.batch,
        None if options.size == "auto" else options.size,
        ProfileOptions(
            world.device,
            resolve_precision(options.precision, world.device, field="--precision"),
            uses_channels_last(Recipe(), world.device),
            options.repeats,
            lambda rounds: progress(rounds, f"timing {options.cuts}", len(rounds)),
        ),
        inside_blocks=options.all,
        stages=options.stages,
    )
