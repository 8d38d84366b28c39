"""How many training images per second does one core decode, and how does a loader scale with cores?

Part one: read a file, decode it, take a random resized crop of 224, and mirror half of them. Every library does all
of this with the same boxes, pinned to one core, and they alternate every few images, so that noise affects all. The
measure is the CPU time of the process, which other programs do not disturb. Next to the speed is the fraction of
values that equal Pillow's crop and resize, which is what torchvision's transforms do to PIL images: a fast path
with different pixels trains a different network.

Part two: the complete loader with 1, 2, 4 ... workers: Drumline's threads, Drumline's processes, and torch's
DataLoader with PIL transforms. Images per second of wall time; efficiency is speed / (workers x speed of one
worker).

    python benchmarks/feed_cpu.py --path photos.tar
    python benchmarks/feed_cpu.py                          # synthetic photographs

Libraries that are not installed are skipped, each with a line. Exits with 1 if any of Drumline's pixels differs
from Pillow's.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cutters import PILLOW, Cutter, cutters
from drumline.core.machine import usable_cores
from drumline.data.feed.batch import BadSamples
from drumline.data.feed.loader import LoaderWorkers, batches
from drumline.data.feed.sampler import training_requests
from drumline.data.feed.transform import Transform
from drumline.data.sources import DatasetSpec, EncodedDataset
from feeds import Files, torch_loader, torchvision_transform
from harness import Parser
from photographs import VERSION, lay_in_folders, machine, photographs
from pixels import Difference

CHUNK = 25
"""Images per turn: enough to warm the processor's caches."""
OWN_BOXES = "torchvision v2 transforms, own boxes"


def main() -> int:
    asked = _arguments()
    os.environ["VIPS_CONCURRENCY"] = "1"
    torch.set_num_threads(1)
    transform = Transform(asked.size, "crop-flip", resize=VERSION)
    with tempfile.TemporaryDirectory(prefix="drumline-feed-") as temporary:
        folder = Path(temporary)
        photos = photographs(asked.path, made_up=asked.made_up)
        source = lay_in_folders(photos, folder)
        print(f"{machine()}\n{photos.description}\n")
        exact = one_core(source, transform, asked.rounds)
        if not asked.no_scaling:
            scaling(source, folder, transform, asked.rounds, asked.workers, asked.batch)
    return 0 if exact else 1


def one_core(source: EncodedDataset, transform: Transform, rounds: int) -> bool:
    """Prints the table of part one. Returns whether all of Drumline's pixels equal Pillow's."""
    contestants, missing = cutters(transform)
    contestants |= torchvision_transforms(transform.size)
    paths = [source.where(sample) for sample in range(len(source))]
    sizes = np.array([Image.open(path).size for path in paths], np.int32)
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    differences = dict.fromkeys(contestants, Difference())
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        for number in range(rounds):
            rows = transform.geometry(0, number, np.arange(len(paths)), sizes)
            took = dict.fromkeys(contestants, 0.0)
            for first in range(0, len(paths), CHUNK):
                which = slice(first, first + CHUNK)
                windows = {}
                for name, way in contestants.items():
                    begun = time.process_time()
                    windows[name] = [
                        way(_read(path), row, transform.size)
                        for path, row in zip(paths[which], rows[which], strict=True)
                    ]
                    took[name] += time.process_time() - begun
                for name, made in windows.items():
                    for one, right in zip(made, windows[PILLOW], strict=True):
                        differences[name] = differences[name].with_pair(one, right)
            for name, seconds in took.items():
                speeds[name].append(len(paths) / seconds)
            print(f"one core: round {number + 1} of {rounds} done", file=sys.stderr, flush=True)
    finally:
        os.sched_setaffinity(0, allowed)
    print(
        f"one core, {transform.size} x {transform.size}, CPU time; means of {rounds} rounds of "
        f"{len(paths)} images, alternating\n"
    )
    print(
        "| path | ms | img/s/core | min..max | speed relative to Pillow | values equal to Pillow's |\n"
        "|---|---|---|---|---|---|"
    )
    for name, found in speeds.items():
        ratio = statistics.mean(mine / pillow for mine, pillow in zip(found, speeds[PILLOW], strict=True))
        equal = "different boxes" if name == OWN_BOXES else differences[name].cells().partition(" |")[0]
        print(
            f"| {name} | {1000 / statistics.mean(found):.2f} | {statistics.mean(found):.0f} | "
            f"{min(found):.0f}..{max(found):.0f} | {ratio:.2f}x | {equal} |"
        )
    print("\n".join(["", *missing]), flush=True)
    return all(differences[name].exact for name in contestants if "Drumline" in name)


def scaling(
    source: EncodedDataset, folder: Path, transform: Transform, rounds: int, most: int, batch: int
) -> None:
    """Prints the table of part two."""
    load = os.getloadavg()[0]
    counts = sorted({1, *(2**power for power in range(1, most.bit_length()) if 2**power <= most), most})
    spec = DatasetSpec("folder", str(folder), "train")
    kinds: dict[str, Callable[[int], Generator[int, None, None]]] = {
        "Drumline, threads": lambda count: ours(
            source, spec, transform, LoaderWorkers("threads", count), batch
        ),
        "Drumline, processes": lambda count: ours(
            source, spec, transform, LoaderWorkers("processes", count), batch
        ),
        "DataLoader + PIL transforms": lambda count: data_loader(source, transform.size, count, batch),
    }
    speeds: dict[tuple[str, int], list[float]] = {(kind, count): [] for kind in kinds for count in counts}
    for number in range(rounds):
        for count in counts:
            for kind, open_feed in kinds.items():
                # Processes deliver in waves of one batch each, so only whole waves count.
                warm, timed = 2 * count, count * max(4, math.ceil(12 / count))
                with closing(open_feed(count)) as feed:
                    for _ in islice(feed, warm):
                        pass
                    begun = time.perf_counter()
                    images = sum(islice(feed, timed))
                    speeds[kind, count].append(images / (time.perf_counter() - begun))
        print(f"scaling: round {number + 1} of {rounds} done", file=sys.stderr, flush=True)
    print(
        f"\nthe complete loader, batches of {batch}, wall time; means of {rounds} alternating rounds; load average "
        f"at the start: {load:.1f}\n"
    )
    print("| loader | workers | img/s | min..max | vs. DataLoader | efficiency |\n|---|---|---|---|---|---|")
    for (kind, count), found in speeds.items():
        mean, alone = statistics.mean(found), statistics.mean(speeds[kind, 1])
        peer = statistics.mean(speeds["DataLoader + PIL transforms", count])
        print(
            f"| {kind} | {count} | {mean:.0f} | {min(found):.0f}..{max(found):.0f} | {mean / peer:.2f}x | "
            f"{mean / alone / count:.2f} |"
        )
    print(
        "\nDrumline reads files ahead in a few more threads, which mostly wait: with one worker, it uses a little "
        "more than one core"
    )


def ours(
    source: EncodedDataset, spec: DatasetSpec, transform: Transform, workers: LoaderWorkers, batch: int
) -> Generator[int, None, None]:
    """Sizes of the batches that Drumline's loader makes."""
    batch = min(batch, len(source))
    requests = training_requests(
        seed=0, samples=len(source), batch=batch, first_step=0, last_step=10**9, local=slice(0, batch)
    )
    bad_samples = BadSamples("training", len(source), 0.0)
    with closing(
        batches(spec, source, transform, 0, requests, workers, torch.device("cpu"), bad_samples)
    ) as feed:
        for made in feed:
            yield len(made.labels)


def data_loader(source: EncodedDataset, size: int, workers: int, batch: int) -> Generator[int, None, None]:
    """Sizes of the batches of torch's DataLoader, with torchvision's transforms if they are installed."""
    files = Files(source, 10**6, installed_transform(size) or PillowTransform(size))
    for images, _ in torch_loader(files, min(batch, len(source)), workers):
        yield len(images)


def installed_transform(size: int) -> Callable[[Any], Tensor] | None:
    """torchvision's transform, or None if it is not installed."""
    try:
        return torchvision_transform(size)
    except Exception:  # not installed or incompatible: nearly any exception
        return None


def torchvision_transforms(size: int) -> dict[str, Cutter]:
    """torchvision's own transforms: they draw their own boxes, so their pixels cannot be compared."""
    transform = installed_transform(size)
    if transform is None:
        return {}
    return {
        OWN_BOXES: lambda data, row, side: (
            transform(Image.open(io.BytesIO(data)).convert("RGB")).permute(1, 2, 0).numpy()
        )
    }


class PillowTransform:
    """Random resized crop and mirror of a PIL image, written by hand, for machines without torchvision."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Image.Image) -> Tensor:
        wide, high = image.size
        for _ in range(10):
            area, aspect = (
                wide * high * random.uniform(0.08, 1),
                math.exp(random.uniform(-1, 1) * math.log(4 / 3)),
            )
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= wide and 0 < h <= high:
                break
        else:
            w = h = min(wide, high)
        left, top = random.randint(0, wide - w), random.randint(0, high - h)
        crop = image.crop((left, top, left + w, top + h))
        crop = crop.resize((self.size, self.size), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(crop)).permute(2, 0, 1).contiguous()


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 (a Path object for each file costs more than the open)
        return file.read()


def _arguments() -> argparse.Namespace:
    parser = Parser(__doc__, made_up=3, size=64, rounds=1, batch=2, workers=2)
    parser.add_argument("--path", help="folder or tar of photographs; default: synthetic ones")
    parser.add_argument(
        "--made-up", type=int, default=100, help="number of synthetic photographs without --path"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument(
        "--workers", type=int, default=usable_cores(), help="the most workers to measure; default: cores"
    )
    parser.add_argument("--batch", type=int, default=64, help="batch size of the loaders")
    parser.add_argument("--no-scaling", action="store_true", help="only the table for one core")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
