"""`drumline compare`: two models layer by layer, or two runs bit by bit."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any, Literal

from drumline.cli.help import Command
from drumline.config.arguments import read_options
from drumline.config.learning import AutoInt
from drumline.config.limits import Range
from drumline.core.errors import UserError
from drumline.core.text import message, print_result, printable, wrapped

if TYPE_CHECKING:
    from drumline.comparison.describe import Verdict
    from drumline.comparison.measure import Measured, Side
    from drumline.comparison.sides import Foreign


@dataclass(frozen=True)
class Options:
    """The arguments of `drumline compare`."""

    a: str
    """A run folder, a checkpoint, a weights file or a model."""
    b: str
    """The same, to compare with A."""
    models: bool = False
    """Compare two runs or checkpoints as models, layer by layer, instead of bit by bit."""
    size: Annotated[AutoInt, Range(1, 16384)] = "auto"
    """Height and width of the images in pixels. `auto`: the size that the models are made for."""
    batch: Annotated[int, Range(2, 65536)] = 4
    """Images per step."""
    classes: Annotated[Literal["auto"] | int, Range(1, 10**7)] = "auto"
    """Number of classes. `auto`: as in the weights, otherwise 1000."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    all: bool = False
    """List every layer, not only those around the differences."""
    trust: bool = False
    """Run code that a run names as package.module:factory to build its model."""


COMMAND = Command(
    name="compare",
    usage="A B [options]",
    about="""
        Check whether two models are the same network, or whether two runs have the same bits.
        If not, report where they first differ.

        Models. A and B are models (resnet50, torchvision/NAME, timm/NAME, your own
        package.module:factory), weights files, or run folders. Both models compute one step on
        the same images. Layers are paired by what they compute, not by their names. The report
        names each difference (a missing max-pool, a stride in a different layer, a bias before
        a BatchNorm, a different eps), and what the differences cost in parameters, FLOPs,
        activation memory and step time. It also compares outputs and gradients with equal
        weights. Weights files that do not name their model are compared with the other side by
        the names and shapes of their tensors.

        Runs. Two run folders or checkpoints (RUN/checkpoints/step-N) are compared bit by bit, by
        the fingerprints that a run records. The report shows the first step that differs and,
        within it, the first differing tensor; the last step that agrees; differences in recipe
        and set-up; loss and top-1 of both runs; and, if both have a later checkpoint, how far
        apart they are. --models compares the trained models instead.

        If stdout is not a terminal, its last line is JSON.

        Exit code 0: equal. 1: different. 2: not comparable, for example a damaged file.
    """,
    options=Options,
    examples="""
  drumline compare resnet50 timm/resnet50
  drumline compare resnet50 mynets:build --size 160 --classes 10
  drumline compare mynets:build downloaded.pth
  drumline compare runs/photos-resnet50-1 runs/photos-resnet50-2
  drumline compare runs/photos-resnet50-1 runs/photos-resnet50-2 --models --all
""",
)


def main(argv: list[str]) -> int:
    options = read_options(argv, Options, "compare")

    from drumline.comparison.sides import kind_of

    if not options.models and {kind_of(options.a), kind_of(options.b)} == {"folder"}:
        return _runs(Path(options.a), Path(options.b))
    return _models(options)


def _runs(a: Path, b: Path) -> int:
    from drumline.comparison.runs import curve_lines, curve_points
    from drumline.observe.runs import metric_lines
    from drumline.state.compare import compare

    found = compare(a, b)
    points = curve_points(metric_lines(a), metric_lines(b))
    for line in (*found.lines, *([] if found.equal else curve_lines(points))):
        print(message(line))
    result = {key: value for key, value in asdict(found).items() if key != "lines"}
    print_result(result | {"curves": [asdict(point) for point in points]})
    return 0 if found.equal else 1


def _models(options: Options) -> int:
    from drumline.comparison.sides import Foreign, open_sides
    from drumline.inference.export.load import exported_format

    for argument in (options.a, options.b):
        if exported_format(Path(argument)):
            raise UserError(
                f"{argument} is an exported program, whose layers cannot be compared",
                "give the run or the weights that it was exported from",
            )
    sides = open_sides(options.a, options.b, options.classes, options.trust)
    if isinstance(sides.a, Foreign) or isinstance(sides.b, Foreign):
        return _tensors(sides.a, sides.b)
    return _networks(options, sides.a, sides.b, sides.size if options.size == "auto" else options.size)


def _tensors(a: Side | Foreign, b: Side | Foreign) -> int:
    """Compares by names and shapes alone. A model comes first."""
    from drumline.comparison.sides import Foreign, tensors_of
    from drumline.comparison.weights import compare_tensors, tensor_lines
    from drumline.state.weights import fitting_models

    files = isinstance(a, Foreign) and isinstance(b, Foreign)
    if isinstance(a, Foreign) and not files:
        a, b = b, a
    found = compare_tensors(tensors_of(a), tensors_of(b), values=files)
    fitting = [] if found.equal or not isinstance(b, Foreign) else fitting_models(b.label)
    lines = [f"A: {a.label}", f"B: {b.label}", *tensor_lines(found, fitting)]
    for line in lines:
        print(wrapped(message(line), _width()))
    print_result({"equal": found.equal, "a": a.label, "b": b.label, **asdict(found), "fits": fitting})
    return 0 if found.equal else 1


def _networks(options: Options, a: Side, b: Side, size: int) -> int:
    import torch

    from drumline.comparison.describe import judge, verdict_lines
    from drumline.comparison.measure import measure
    from drumline.comparison.table import table_lines, totals_lines
    from drumline.core.progress import progress
    from drumline.parallel.process_group import pick_device, resolve_device_type

    device = pick_device(resolve_device_type(options.device, "device"), 0)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(options.batch, 3, size, size, generator=generator).to(device)
    for side in (a, b):
        side.model.to(device)
    try:
        measured = measure(a, b, images, lambda rounds: progress(rounds, "comparing", len(rounds)))
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{options.batch} images of {size} x {size} do not fit into the GPU's memory",
            f"set --batch to less than {options.batch}, or --size to less than {size}",
        ) from error
    verdict, width = judge(measured), _width()
    blocks = [
        [f"A: {printable(a.label)}", f"B: {printable(b.label)}"],
        verdict_lines(verdict, width),
        table_lines(measured, verdict.findings, width, options.all),
        totals_lines(measured),
        [
            f"one step: {options.batch} images of {size} x {size} on {device.type}; times are medians over rounds"
        ],
    ]
    print("\n\n".join("\n".join(map(message, block)) for block in blocks if block))
    print_result(_result(a.label, b.label, measured, verdict))
    return 0 if verdict.equal else 1


def _result(a: str, b: str, measured: Measured, verdict: Verdict) -> dict[str, Any]:
    values = measured.values
    return {
        "equal": verdict.equal,
        "a": a,
        "b": b,
        "summary": verdict.sentence,
        "findings": [
            {"code": each.code, "text": each.text, "layers": [measured.a[n].name for n in each.layers]}
            for each in verdict.findings
        ],
        "notes": verdict.notes,
        "totals": {
            "a": asdict(measured.totals[0]),
            "b": asdict(measured.totals[1]),
            "step_ratio": measured.ratio,
        },
        "values": {
            "output": values.output,
            "evaluation": values.evaluation,
            "tolerance": values.tolerance,
            "first_layer": None if values.layer is None else measured.a[values.layer].name,
            "first_gradient": values.gradient,
        },
    }


def _width() -> int:
    return max(60, min(140, get_terminal_size().columns)) if sys.stdout.isatty() else 100
