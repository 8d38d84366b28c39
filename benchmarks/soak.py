"""Does the feed stay stable over time? Memory, descriptors, threads and throughput over an hour.

Feeds batches of image files, epoch after epoch, through the loader that training uses, without a reset. Every
minute it also opens, iterates and closes an evaluation feed, as a run does. Every few seconds it records the
resources of the process. At the end it compares the first tenth with the last; the first minute is warm-up.
Throughput is also given in images per second of CPU time, which other programs do not disturb. The set may contain
broken files, which are replaced as in a run.

    python benchmarks/soak.py --path photos --minutes 60 --batch 64 --out soak.jsonl
    python benchmarks/soak.py --small       # one second with synthetic photographs: a check that the script works
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

import psutil
import torch

from drumline import native
from drumline.core.machine import usable_cores
from drumline.data.feed.batch import BadSamples
from drumline.data.feed.loader import LoaderWorkers, batches
from drumline.data.feed.sampler import evaluation_requests, training_requests
from drumline.data.feed.transform import Transform
from drumline.data.sources import DatasetSpec, detect_source, open_dataset
from harness import Parser
from photographs import lay_in_folders, photographs

ENDLESS = 10**12


def main() -> None:
    parser = Parser(
        __doc__, minutes=0.015, batch=4, size=64, workers=2, device="cpu", sample_s=0.2, evaluate_s=0.3
    )
    parser.add_argument("--path", help="folder, tar or packed set of image files; default: synthetic ones")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--pool", choices=("threads", "processes"), default="threads")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--decode", choices=("cpu", "gpu", "both"), default="cpu")
    parser.add_argument(
        "--no-evaluate",
        dest="evaluate",
        action="store_false",
        help="no evaluation feed, for a set without an evaluation split",
    )
    parser.add_argument("--sample-s", type=float, default=5.0, help="seconds between measurements")
    parser.add_argument("--evaluate-s", type=float, default=60.0, help="seconds between evaluations")
    parser.add_argument("--out", type=Path, help="file for the measurements, as JSON lines")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drumline-soak-") as folder:
        if asked.path is None:
            asked.path = folder
            for split in ("train", "val"):
                (Path(folder) / split).mkdir()
                lay_in_folders(photographs(None, made_up=8), Path(folder) / split)
        soak(asked)


def soak(asked: argparse.Namespace) -> None:
    """Feeds until the time is over, then prints the report."""
    spec = DatasetSpec(detect_source("auto", asked.path), asked.path, "train")
    source = open_dataset(spec)
    transform = Transform(asked.size, "crop-flip", on_bad="substitute")
    requests = training_requests(
        seed=0,
        samples=len(source),
        batch=asked.batch,
        first_step=0,
        last_step=ENDLESS,
        local=slice(0, asked.batch),
    )
    workers = LoaderWorkers(asked.pool, asked.workers, decode=asked.decode)
    bad_samples = BadSamples("training", len(source), 1.0)
    process = psutil.Process()
    rows: list[dict[str, float]] = []
    begin = then = time.monotonic()
    cpu_then, images = process.cpu_times(), 0
    device = torch.device(asked.device)
    evaluation, evaluated = DatasetSpec(spec.source, spec.path, "eval"), begin
    feed = batches(spec, source, transform, 0, requests, workers, device, bad_samples)
    with closing(feed):
        for batch in feed:
            images += len(batch.labels)
            if asked.evaluate and time.monotonic() - evaluated > asked.evaluate_s:
                images += evaluate(evaluation, transform, asked.batch, workers, device)
                evaluated = time.monotonic()
            now = time.monotonic()
            if now - then < asked.sample_s:
                continue
            cpu = process.cpu_times()
            used = cpu.user + cpu.system - cpu_then.user - cpu_then.system
            rows.append(
                {
                    "seconds": now - begin,
                    "images_per_s": images / (now - then),
                    "images_per_cpu_s": images / used,
                    "rss_mb": process.memory_info().rss / 2**20,
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                    "gpu_mb": torch.cuda.memory_reserved() / 2**20 if asked.device == "cuda" else 0.0,
                }
            )
            if asked.out:
                with asked.out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            then, cpu_then, images = now, cpu, 0
            if now - begin > 60 * asked.minutes:
                break
    report(rows, workers, len(source), bad_samples)


def evaluate(
    spec: DatasetSpec, transform: Transform, batch: int, workers: LoaderWorkers, device: torch.device
) -> int:
    """Iterates over the evaluation set once. Returns the number of images."""
    source = open_dataset(spec)
    requests = evaluation_requests(samples=len(source), batch=batch, rank=0, world=1)
    bad_samples = BadSamples("evaluation", len(source), 1.0)
    with closing(
        batches(spec, source, transform.for_evaluation(), 0, requests, workers, device, bad_samples)
    ) as feed:
        return sum(len(each.labels) for each in feed)


def report(
    rows: list[dict[str, float]], workers: LoaderWorkers, samples: int, bad_samples: BadSamples
) -> None:
    """Prints the first tenth next to the last."""
    warm = [row for row in rows if row["seconds"] >= 60] or rows
    tenth = max(1, len(warm) // 10)
    print(
        f"{workers}, native extension {native.describe()}; {samples:,} files, {len(bad_samples.bad)} of them broken; "
        f"{rows[-1]['seconds'] / 60:.1f} minutes"
    )
    print(f"{'':>18}{'first tenth':>14}{'last tenth':>14}{'ratio':>9}")
    for name in ("images_per_s", "images_per_cpu_s", "rss_mb", "descriptors", "threads", "gpu_mb"):
        first = statistics.median(row[name] for row in warm[:tenth])
        last = statistics.median(row[name] for row in warm[-tenth:])
        print(f"{name:>18}{first:>14.1f}{last:>14.1f}{last / first if first else 1.0:>9.3f}")


if __name__ == "__main__":
    main()
