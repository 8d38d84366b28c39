"""`drumline export`: writes a trained model to a file for other programs, verified against the original."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from drumline.cli.help import Command
from drumline.cli.predict import trust_by_option
from drumline.config.arguments import read_options
from drumline.config.limits import Range
from drumline.core.errors import UserError
from drumline.core.text import percent, print_result, printable
from drumline.inference.export.formats import ENDINGS, AnyFormat, Device, How, Weights


@dataclass(frozen=True)
class Options:
    """The arguments of `drumline export`."""

    model: str
    """A run folder, a checkpoint, or weights that Drumline wrote."""
    format: Literal["auto", AnyFormat] = "auto"
    """Format of the file. `auto`: by the extension of `--out`, where .pt2 means pt2."""
    out: str = ""
    """File to write. Default: the name of the run with the extension of the format (.aoti.pt2 for aoti), in the
    current folder. An existing file is replaced once the new one is verified."""
    raw: bool = False
    """Export a program that takes normalised float images (batch, 3, size, size) and returns logits, instead of
    pixels and probabilities."""
    weights: Weights = "auto"
    """`auto`: a run's best weights, as for `drumline predict` (averaged weights if train.ema is on). `model`,
    `average`: the trained or the averaged weights of the newest checkpoint."""
    how: How = "trace"
    """For torchscript: `trace` records one pass, and `script` compiles the source, which keeps branches."""
    images: tuple[str, ...] = ()
    """Verify on these images: files, folders or .tar archives, instead of the run's evaluation images."""
    samples: Annotated[int | Literal["all"], Range(1, 1 << 30)] = 512
    """Verify on this many images, evenly spaced over the split, or on `all`."""
    device: Device = "cpu"
    """Where to verify and time the file. pt2 and aoti files run on this device only, the others on both."""
    trust: bool = False
    """Run the code that builds the model, if it is your own (package.module:factory)."""


COMMAND = Command(
    name="export",
    usage="MODEL --format FORMAT [--out FILE] [options]",
    about="""
        Write a trained model to a file for other programs. MODEL is a run folder (its best
        weights), a checkpoint, or weights that Drumline wrote. FORMAT is one of
          onnx         ONNX Runtime, in any language
          pt2          torch.export: PyTorch, without the code of the model
          aoti         AOTInductor: compiled for this CPU or GPU, for C++ and Python
          torchscript  older C++ programs and mobile; deprecated by PyTorch
          safetensors  weights only, with their record

        The file takes uint8 pixels (batch, size, size, 3), RGB, in batches of any size, and
        returns probabilities. Normalisation and softmax are part of it; decoding and resizing
        are not. The record in the file's metadata has the class names and the preprocessing
        (size, crop, filter). `drumline predict FILE` applies it.

        Every file is verified before it gets its name: it is loaded back and compared with the
        model on the run's evaluation images, starting with decoding, in batches of several
        sizes. Pixels must be equal, no image may change its class, and logits may differ by
        rounding only. If a file fails, nothing is written, and the error names the cause if it
        is known.

        If stdout is not a terminal, the report is one line of JSON.

        Exit code 0: written and verified. 2: an error, with a fix.
    """,
    options=Options,
    examples="""
  drumline export runs/photos --out photos.onnx
  drumline export runs/photos --format aoti --device cuda --out photos.pt2
  drumline export runs/photos --format pt2 --samples all
  drumline export best.safetensors --format onnx --images photos/val
""",
)


def main(argv: list[str]) -> int:
    options = read_options(argv, Options, "export")
    kind = _format(options)

    from drumline.inference.export.export import export_model

    with trust_by_option():
        report = export_model(**vars(options) | {"format": kind})
    if sys.stdout.isatty():
        print(report_text(options.model, report))
    else:
        print_result(report)
    return 0


def _format(options: Options) -> AnyFormat:
    """The requested format, by name or by the extension of `--out`."""
    if options.format != "auto":
        return options.format
    ending = Path(options.out).suffix
    named = [kind for kind, each in ENDINGS.items() if each == ending]
    if not named:
        raise UserError(
            f"export needs a format{f', and {ending!r} is not the extension of one' if options.out else ''}",
            "add --format onnx, pt2, aoti, torchscript or safetensors",
        )
    return named[0]


def report_text(model: str, report: dict[str, Any]) -> str:
    """The report as a table and a verdict."""
    floor, apart = report["floor"], report["probability_difference"]
    accuracy = report["accuracy"]
    rows = [
        ("", "model vs itself", "file vs model", "limit"),
        (
            "logits, largest",
            _number(floor["logits"]),
            _number(report["logit_difference"]),
            _number(report["limit"]),
        ),
        ("probabilities, largest", _number(floor["probability_max"]), _number(apart["max"]), ""),
        ("probabilities, mean", _number(floor["probability_mean"]), _number(apart["mean"]), ""),
        ("same class", "", percent(report["top1_agreement"]), "100 %"),
    ]
    if accuracy:
        rows.append(("accuracy", f"{accuracy['model']:.2%}", f"{accuracy['exported']:.2%}", ""))
    for batch, times in report.get("latency", {}).items():
        speed = times["model_ms"] / max(times["exported_ms"], 1e-9)
        rows.append(
            (
                f"batch of {batch}",
                f"{times['model_ms']:.1f} ms",
                f"{times['exported_ms']:.1f} ms",
                f"{speed:.2f}x as fast",
            )
        )
    lines = [f"  {name:<24}{one:>16}{two:>16}  {three}".rstrip() for name, one, two, three in rows]
    batches = ", ".join(map(str, report["batches"]))
    lines.append(f"  pixels: equal; batches of {batches}: consistent{_OTHER_SIZES[report['other_size']]}")
    lines += [f"  note: {each}" for each in _notes(report)]
    size = report["bytes"] / 1e6
    where = " on the GPU" if report["device"] == "cuda" else ""
    head = f"verified{where} on {report['images']:,} {printable(report['of'])}"
    verdict = f"OK: {printable(report['file'])} ({size:.1f} MB) matches {printable(model)}"
    return "\n".join([head, *lines, verdict])


_OTHER_SIZES = {
    "": "",
    "rejected": "; other image sizes: rejected",
    "works": "; other image sizes: supported",
    "differs": "; other image sizes: wrong results, so do not use them",
    "unchecked": "; other image sizes: not checked by this format, so do not use them",
}


def _notes(report: dict[str, Any]) -> list[str]:
    notes = list(report.get("notes", ()))
    if report["unreadable"]:
        notes.append(f"{report['unreadable']:,} images cannot be read and were left out")
    if report["undecided"]:
        notes.append(
            f"{report['undecided']:,} images change between two classes that the model finds equally likely"
        )
    if report.get("constants"):
        notes.append(f"the trace made constants from shapes in {', '.join(report['constants'])}")
    if report["format"] == "torchscript":
        notes.append("PyTorch has deprecated TorchScript; use pt2, onnx or aoti for new programs")
    return notes


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"
