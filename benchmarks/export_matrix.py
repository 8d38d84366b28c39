"""Every model in every format of `drumline export`: whether the file matches the model, and how fast it is.

    python benchmarks/export_matrix.py [--data FOLDER] [--size 64] [--steps 20] [--models NAME ...] [--formats ...]
    python benchmarks/export_matrix.py --device cuda --size 224 --batches 1 256 --jobs 6
    python benchmarks/export_matrix.py --small      # one model, two formats: a check that the script works

Trains each model for a few steps on FOLDER (default: the embedded digits), exports it in each format, and verifies it
on every evaluation image. Then model and file are timed in alternating rounds, with pixels that are on the device.
Prints a markdown table. Exits with 1 if a file gives different results; a format that cannot hold a model is a row
with the reason.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import drumline
from drumline.inference.export.verify import latency
from drumline.inference.model import load_model, load_trained
from harness import Parser

MODELS = (
    "resnet18",
    "vgg13_bn",
    "mobilenet_v2",
    "resnet20",
    "resnet8x4",
    "export_matrix:vit",
    "export_matrix:branches",
)
FORMATS = ("onnx", "pt2", "aoti", "torchscript", "safetensors")
ENDINGS = {"onnx": ".onnx", "torchscript": ".pt", "safetensors": ".safetensors"}


class ViT(nn.Module):
    """A small vision transformer of torch's own layers, for images of any size that is divisible into patches."""

    def __init__(self, classes: int, width: int = 64, patch: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.layers(torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1))[:, 0])


class Branches(nn.Module):
    """Branches on a shape and on a Python value, which an export may resolve."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if not i else 32, 32, 3, padding=1) for i in range(4))
        self.residual = True
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        for number, conv in enumerate(self.convs):
            y = conv(x).relu()
            x = x + y if self.residual and number else y
            if x.shape[2] > 8:
                x = nn.functional.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


def vit(classes: int) -> nn.Module:
    return ViT(classes)


def branches(classes: int) -> nn.Module:
    return Branches(classes)


def main() -> int:
    parser = Parser(
        __doc__, models=["resnet8"], formats=["torchscript", "safetensors"], steps=2, size=16, samples=64
    )
    parser.add_argument("--data", default="", help="a folder of photographs; default: the embedded digits")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="batch sizes to time")
    parser.add_argument("--samples", type=int, default=0, help="evaluation images; 0: all of them")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=(*FORMATS, "script"))
    parser.add_argument(
        "--jobs", type=int, default=1, help="models to train and export at a time, before the timing"
    )
    options = parser.parse_args()
    timed = [f"batch of {batch}" for batch in options.batches]
    columns = ["model", "format", "images", "same class", "logits differ by", "limit", *timed, "export"]
    wrong = 0
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(options.jobs) as pool:
        print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
        for rows in pool.starmap(
            exports, [(model, options, folder) for model in options.models], chunksize=1
        ):
            for row in rows:
                times = speeds(row, options) if row.right and row.file else [""] * len(options.batches)
                print(f"| {' | '.join([*row.cells, *times, row.seconds])} |", flush=True)
                wrong += not row.right
    machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(f"\n{machine}, {os.cpu_count()} CPU cores, torch {torch.__version__}")
    return 1 if wrong else 0


@dataclass
class Row:
    """What one export gave."""

    run: str
    cells: list[str]
    right: bool
    file: str = ""
    seconds: str = ""


def exports(model: str, options: Namespace, folder: str) -> list[Row]:
    run = trained(model, options, folder)
    return [export(model, run, kind, options, Path(folder)) for kind in options.formats]


def trained(model: str, options: Namespace, folder: str) -> str:
    """The run folder of a model after a few steps."""
    settings = [
        f"model.name={model}",
        f"data.path={options.data}" if options.data else "data.source=digits",
        *(f"data.size={options.size}", "data.batch=32", "data.workers=0", "data.holdout=0"),
        *(f"train.steps={options.steps}", "optim.lr=0.02", "parallel.processes=1"),
        *(f"run.device={options.device}", f"run.dir={folder}", f"run.name={model.replace(':', '-')}"),
    ]
    return str(drumline.train(drumline.Recipe.from_args(settings))["run"])


def export(model: str, run: str, kind: str, options: Namespace, folder: Path) -> Row:
    """Exports and verifies. The file is right, or the export was rejected for a reason of its format."""
    name = model.removeprefix("export_matrix:")
    began = time.perf_counter()
    format_ = "torchscript" if kind == "script" else kind
    out = folder / f"{name}-{kind}{ENDINGS.get(format_, '.pt2')}"
    try:
        report = drumline.export_model(
            run,
            format_,  # type: ignore[arg-type]
            out,
            how="script" if kind == "script" else "trace",
            samples=options.samples or "all",
            device=options.device,
            trust=True,
        )
    except drumline.UserError as error:
        reason = f"rejected ({error.code}): {error.what.splitlines()[0]}"
        known = error.code in ("export-failed", "unsupported-operator", "no-compiler", "missing-package")
        return Row(run, [name, kind, "", reason, "", ""], known)
    cells = [name, kind, f"{report['images']:,}", f"{report['top1_agreement']:.2%}"]
    cells += [f"{report['logit_difference']:.1e}", f"{report['limit']:.1e}"]
    # Weights are the model itself: there is nothing to time.
    file = "" if kind == "safetensors" else str(out)
    return Row(run, cells, True, file, f"{time.perf_counter() - began:.0f} s")


def speeds(row: Row, options: Namespace) -> list[str]:
    """How many times as fast as the model the file is."""
    original = load_trained(row.run, device=options.device, trust=True)
    exported = load_model(row.file, device=options.device, trust=True)
    found = []
    for batch in options.batches:
        shape = (batch, original.record.size, original.record.size, 3)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
        model_ms, file_ms = latency(original, exported, pixels)
        rate = f", {1000 * batch / file_ms:,.0f} img/s" if options.device == "cuda" else ""
        found.append(f"{model_ms / file_ms:.2f}x ({model_ms:.2f} / {file_ms:.2f} ms{rate})")
    return found


if __name__ == "__main__":
    sys.exit(main())
