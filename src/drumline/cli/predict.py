"""`drumline predict`: the classes of images, by a trained model."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from drumline.cli.help import Command
from drumline.config.arguments import read_options
from drumline.config.limits import Range
from drumline.core.errors import UserError
from drumline.core.files import check_output, write_output
from drumline.core.progress import progress
from drumline.core.text import counted, either, json_line, message, printable

if TYPE_CHECKING:
    from drumline.inference.classifier import Classifier
    from drumline.inference.images import ImageInput
    from drumline.inference.predict import PredictedImage

Format = Literal["auto", "table", "csv", "json", "html"]
ENDINGS: dict[str, Format] = {".csv": "csv", ".json": "json", ".html": "html", ".txt": "table"}


@dataclass(frozen=True)
class Options:
    """The arguments of `drumline predict`."""

    model: str
    """A run folder, a checkpoint, weights that Drumline wrote, or a file that `drumline export` wrote."""
    images: tuple[str, ...]
    """Image files, folders, .tar archives, or - for an image on stdin."""
    top: Annotated[int, Range(1, 1000)] = 1
    """How many classes to give for each image, the most likely first."""
    format: Format = "auto"
    """How to write the predictions. `html`: a page with the pictures. `auto`: by the extension of `--out`; without
    `--out`, a table on a terminal and JSON elsewhere."""
    out: str = ""
    """Write the predictions to this file: .csv, .json, .html or .txt."""
    batch: Annotated[int, Range(1, 4096)] = 64
    """Images that the model computes at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on. `auto`: CUDA if there is a GPU; for an exported file, the device of its export."""
    trust: bool = False
    """Run the code that builds the model, if it is your own (package.module:factory), and load exported programs
    (pt2, aoti, torchscript), which can also run code."""


COMMAND = Command(
    name="predict",
    usage="MODEL IMAGE... [options]",
    about="""
        Name the class of each image. MODEL is a run folder (its best weights), one of its
        checkpoints, weights that Drumline wrote, or a file of `drumline export`; exported
        programs other than ONNX need --trust. IMAGE is an image file, a folder (searched with
        its subfolders for .jpg, .jpeg, .png, .webp and other image files), an uncompressed
        .tar archive, or - for one image on stdin.

        The model's record says how to prepare the images, so predictions agree with
        `drumline eval`: the same size, crop, resize, mean and standard deviation, and exactly
        the same pixels. The model computes in fp32.

        If stdout is not a terminal, the predictions are one line of JSON: a list with path,
        label and probability for each image, in the order of the arguments. With --top N, `top`
        lists the N most likely classes, including the first. An image that cannot be read has
        an `error`, and label and probability are null.

        Exit code 0: every image has a prediction. 1: some images cannot be read; the others
        have predictions. 2: an error, with a fix.
    """,
    options=Options,
    examples="""
  drumline predict runs/photos cat.jpg
  drumline predict runs/photos new-photos --top 3 --out predictions.csv
  drumline predict runs/photos new-photos --out page.html
  drumline predict runs/photos/weights/best.safetensors photos.tar
  curl -s https://example.org/cat.jpg | drumline predict runs/photos -
""",
)


def main(argv: list[str]) -> int:
    options = read_options(argv, Options, "predict")
    out = Path(options.out) if options.out not in ("", "-") else None
    style = _format(options, out)

    from drumline.inference.images import find_images

    if zipped := [path for path in options.images if path.lower().endswith(".zip") and Path(path).is_file()]:
        raise UserError(
            f"{zipped[0]} is a zip archive", "unpack it and give the folder, or give a .tar archive"
        )
    found = find_images(options.images)
    if out is not None:
        _check_output(out, found.images)

    from drumline.inference.formats import table_line
    from drumline.inference.predict import predict_images

    model = _load(options)
    live = style == "table" and out is None
    width = min(60, max(len(printable(image.name)) for image in found.images))
    results = []
    predictions = predict_images(model, found.images, options.top, options.batch)
    for result in progress(predictions, "predicting", len(found.images)):
        if live:
            _write(f"{table_line(result, width)}\n", None)
        results.append(result)
    if not live:
        _write(_text(results, style, options, width), out)
    _report(results, found.skipped, out)
    return 1 if any(result.error for result in results) else 0


def _load(options: Options) -> Classifier:
    from drumline.inference.export.load import exported_format
    from drumline.inference.model import load_model
    from drumline.parallel.process_group import pick_device, resolve_device_type

    with trust_by_option():
        if options.device == "auto" and exported_format(Path(options.model)):
            return load_model(options.model, trust=options.trust)
        device = pick_device(resolve_device_type(options.device, "device"), 0)
        return load_model(options.model, device=device, trust=options.trust)


@contextmanager
def trust_by_option() -> Iterator[None]:
    """Makes errors about untrusted code name the option instead of the function's argument."""
    try:
        yield
    except UserError as error:
        if error.code == "untrusted-code":
            raise UserError(error.what, "if you trust it, add --trust", error.code) from None
        raise


def _check_output(out: Path, images: Sequence[ImageInput]) -> None:
    """Rejects an output that cannot be written, before any work, or that is one of the images."""
    check_output("--out", out)
    if out.exists() and any(Path(image.name).exists() and out.samefile(image.name) for image in images):
        raise UserError(f"--out {out} is one of the images", "give a different file")


def _format(options: Options, out: Path | None) -> Format:
    """The format that is asked for, by name or by the extension of `--out`."""
    if options.format != "auto":
        return options.format
    if out is None:
        return "table" if sys.stdout.isatty() else "json"
    ending = out.suffix.lower()
    if ending not in ENDINGS:
        raise UserError(
            f"--out {options.out}: the extension {ending!r} names no format",
            f"use {either(tuple(ENDINGS))}, or add --format",
        )
    return ENDINGS[ending]


def _text(results: Sequence[PredictedImage], style: Format, options: Options, width: int) -> str:
    from drumline.inference.formats import csv_text, json_rows, page, table_line

    if style == "csv":
        return csv_text(results, max((len(found.best) for found in results), default=1))
    if style == "html":
        return page(results, options.model, lambda shown: progress(shown, "drawing pictures"))
    if style == "table":
        return "".join(f"{table_line(found, width)}\n" for found in results)
    return f"{json_line(json_rows(results))}\n"


def _write(text: str, out: Path | None) -> None:
    try:
        if out is not None:
            write_output(out, text.encode())
        else:
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        where = "stdout" if out is None else f"--out {out}"
        raise UserError(
            f"{where} cannot be written: {error.strerror or error}", "free space, or write elsewhere"
        ) from error


def _report(results: Sequence[PredictedImage], skipped: Counter[str], out: Path | None) -> None:
    """A line on stderr, if there is something that stdout does not show."""
    failed = sum(bool(result.error) for result in results)
    parts = [f"{counted(len(results) - failed, 'image')} predicted"]
    parts += [f"{failed:,} cannot be read"] if failed else []
    if skipped:
        kinds = ", ".join(sorted(skipped)[:5]) + (", ..." if len(skipped) > 5 else "")
        parts += [f"{counted(skipped.total(), 'file')} skipped, which by name are no images ({kinds})"]
    parts += [f"written to {out}"] if out is not None else []
    if len(parts) > 1:
        print(message("; ".join(parts)), file=sys.stderr)
