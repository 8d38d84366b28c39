"""Accuracy on public data sets, each from one command line that can be repeated. Prints a markdown table.

    python benchmarks/accuracy.py --digits --fashion FOLDER --cifar10 PATH --imagenette FOLDER
    python benchmarks/accuracy.py --small               # two steps on the digits: a check that the script works

Runs the sets whose options are given. Fashion-MNIST: a folder with the four idx files. CIFAR-10: an .npz file or the
official batches. Imagenette: class folders under train/ and val/. `--photos` uses default settings; the other recipes
are fixed in this script. The seed is 0. The accuracy is that of the last epoch, not of the best.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from drumline.state.weights import resolve_weights, weights_record
from harness import Parser

DIGITS = "data.batch=64 model.name=resnet8x4 train.epochs=12 optim.lr=0.1 optim.warmup_epochs=1 optim.nesterov=true"
FASHION = (
    "data.batch=128 model.name=resnet8x4 train.epochs=4 optim.lr=0.1 "
    "optim.warmup_epochs=0.3 optim.nesterov=true"
)
CIFAR10 = (
    "data.source={source} data.augment=shift-flip data.batch=512 model.name=cifar/resnet18 train.epochs=24 "
    "optim.lr=0.4 optim.warmup_epochs=4 optim.nesterov=true train.label_smoothing=0.1 train.eval_every=6"
)
IMAGENETTE = (
    "data.batch=64 data.size=160 model.name=resnet18 train.epochs=40 optim.lr=0.05 optim.warmup_epochs=4 "
    "optim.nesterov=true optim.weight_decay=1e-3 train.label_smoothing=0.1 train.eval_every=10"
)


def main() -> None:
    parser = Parser(__doc__, digits=True)
    parser.add_argument("--digits", action="store_true", help="the embedded digits, with 1 and 2 processes")
    parser.add_argument("--fashion", metavar="FOLDER", help="Fashion-MNIST, the four idx files")
    parser.add_argument(
        "--cifar10", metavar="PATH", help="an .npz file, or a folder with the official batches"
    )
    parser.add_argument("--imagenette", metavar="FOLDER", help="class folders; with 1 and 2 processes")
    parser.add_argument("--photos", metavar="FOLDER", help="a few hundred photographs, with default settings")
    parser.add_argument(
        "--weights", metavar="RUN", help="with --photos: weights to fine-tune, at their image size"
    )
    args = parser.parse_args()
    jobs: list[tuple[str, str, int]] = []
    if args.digits:
        jobs += [("digits", DIGITS, processes) for processes in (1, 2)]
    if args.small:
        jobs = [("digits", f"{DIGITS} run.device=cpu parallel.threads=1 train.steps=2", 1)]
    if args.fashion:
        jobs += [("Fashion-MNIST", f"data.path={args.fashion} {FASHION}", 1)]
    if args.cifar10:
        source = "npz" if args.cifar10.endswith(".npz") else "cifar10"
        jobs += [("CIFAR-10", f"data.path={args.cifar10} {CIFAR10.format(source=source)}", 1)]
    if args.imagenette:
        jobs += [("Imagenette subset", f"data.path={args.imagenette} {IMAGENETTE}", n) for n in (1, 2)]
    if args.photos:
        size = f" data.size={weights_size(args.weights)}" if args.weights else ""
        jobs += [("photographs", f"data.path={args.photos} model.name=resnet18{size}", 1)]
        frozen = ("", " train.freeze=backbone", " train.freeze=backbone train.unfreeze_epoch=10")
        tuned = [f"finetune={args.weights} data.path={args.photos}{more}" for more in frozen]
        jobs += [("photographs", words, 1) for words in tuned] if args.weights else []
    if not jobs:
        parser.error("give at least one data set")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU, {platform.machine()}"
    rows = [run(*job) for job in jobs]
    print(
        f"\n{device}, torch {torch.__version__}; total time, including start-up, evaluation and checkpoints\n"
    )
    print("| data | arguments of `drumline train` | processes | correct | top-1 | seconds |")
    print("|---|---|---|---|---|---|")
    print("\n".join(rows))


def weights_size(run: str) -> int:
    """The image size that weights were trained with."""
    record = weights_record(resolve_weights(Path(run)))
    assert record is not None, f"{run} has no record"
    return record.size


def run(name: str, words: str, processes: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        command = [*words.split(), f"parallel.processes={processes}", f"run.dir={folder}"]
        done = subprocess.run(
            [sys.executable, "-m", "drumline", "train", *command],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        seconds = time.perf_counter() - begun
    result = json.loads(done.stdout.splitlines()[-1])
    shown = " ".join(
        "finetune=WEIGHTS" if word.startswith("finetune=") else word
        for word in words.split()
        if not word.startswith("data.path")
    )
    return (
        f"| {name} | `{shown}` | {processes} | {result['correct']:,} of {result['samples']:,} | "
        f"{result['top1']:.2%} | {seconds:.0f} |"
    )


if __name__ == "__main__":
    main()
