"""Which paths give Pillow's pixels? Compares every path's crop and resize with Pillow's, pixel by pixel.

A network trained on one library's pixels and run on another's sees different images, because every library has its
own "bilinear". For each photograph, Pillow decodes, crops, resizes and mirrors, and each library does the same with
the same box. The table shows the percentage of values (3 per pixel) that are exactly equal, and the size of the
differences. Training crops (random resized crop, mirror) and evaluation crops (short side 256, centre 224) are
counted separately. Exits with 1 if a single value of Drumline's differs.

    python benchmarks/pixels.py --path photos.tar
    python benchmarks/pixels.py                      # synthetic photographs

Libraries that are not installed are skipped, each with a line.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image

from cutters import cutters, turned
from drumline import native
from drumline.core.machine import usable_cores
from drumline.data.feed.batch import BadSamples
from drumline.data.feed.choose import gpu_unavailable
from drumline.data.feed.loader import LoaderWorkers, batches
from drumline.data.feed.sampler import evaluation_requests
from drumline.data.feed.transform import Transform
from drumline.data.gpu.layout import layout_of_file
from drumline.data.sources import DatasetSpec, EncodedDataset, open_dataset
from harness import Parser, pick_device
from photographs import VERSION, Photos, Pixels, brief, lay_in_folders, machine, photographs, pillow_window


def by_loader(
    source: EncodedDataset, folder: Path, transform: Transform, workers: LoaderWorkers, device: torch.device
) -> Iterator[Pixels]:
    """Every sample once, in order, through the loader that training uses."""
    requests = evaluation_requests(samples=len(source), batch=64, rank=0, world=1)
    spec, bad_samples = DatasetSpec("folder", str(folder), "train"), BadSamples("pixels", len(source), 0.0)
    with closing(batches(spec, source, transform, 0, requests, workers, device, bad_samples)) as feed:
        for batch in feed:
            yield from batch.images.cpu().numpy()


def without_native_part(folder: Path, transform: Transform) -> Iterator[Pixels]:
    """Drumline's crops from a process without the native extension."""
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        command = [sys.executable, __file__, "--pure-windows", file.name, "--path", str(folder)]
        command += ["--transform", transform.augment, "--size", str(transform.size)]
        subprocess.run(command, check=True, env={**os.environ, "DRUMLINE_NATIVE": "0"})
        yield from np.load(file.name)


def _pure_windows(asked: argparse.Namespace) -> None:
    """The process that `without_native_part` starts."""
    assert not native.available()
    transform = Transform(asked.size, asked.transform, resize=VERSION)
    source = open_dataset(DatasetSpec("folder", asked.path, "train"))
    assert isinstance(source, EncodedDataset)
    made = by_loader(source, Path(asked.path), transform, LoaderWorkers("threads", 0), torch.device("cpu"))
    np.save(asked.pure_windows, np.stack(list(made)))


def by_dali(
    data: Sequence[bytes], rows: NDArray[np.int32], size: int, device: torch.device
) -> Iterator[Pixels]:
    """DALI: decode (on the GPU if there is one), cut the box, resize with antialiasing."""
    from nvidia.dali import fn, pipeline_def, types

    on_gpu, batch = device.type == "cuda", 32

    @pipeline_def(batch_size=batch, num_threads=2, device_id=0 if on_gpu else None, prefetch_queue_depth=1)
    def pipeline() -> Any:
        encoded, start, shape, target = (
            fn.external_source(name=name, dtype=kind, ndim=1)
            for name, kind in (
                ("encoded", types.UINT8),
                ("start", types.INT32),
                ("shape", types.INT32),
                ("target", types.FLOAT),
            )
        )
        images = fn.decoders.image(
            encoded, device="mixed" if on_gpu else "cpu", output_type=types.RGB, adjust_orientation=False
        )
        images = fn.slice(images, start, shape, axes=[1, 0])
        return fn.resize(images, size=target, interp_type=types.INTERP_LINEAR, antialias=True)

    runner = pipeline()
    runner.build()
    for first in range(0, len(data), batch):
        some = np.minimum(np.arange(first, first + batch), len(data) - 1)
        runner.feed_input("encoded", [np.frombuffer(data[i], np.uint8) for i in some])
        runner.feed_input("start", list(rows[some, :2]))
        runner.feed_input("shape", list(rows[some, 2:4] - rows[some, :2]))
        runner.feed_input("target", list(rows[some, 5:3:-1].astype(np.float32)))
        (made,) = runner.run()
        made = made.as_cpu() if on_gpu else made
        for place, i in enumerate(some[: len(data) - first]):
            yield turned(np.asarray(made.at(place)), rows[i], size)


def by_nvjpeg(
    data: Sequence[bytes], rows: NDArray[np.int32], size: int, device: torch.device
) -> Iterator[Pixels]:
    """torchvision on the GPU: nvJPEG decodes, torch resizes there with antialiasing."""
    from torchvision.io import ImageReadMode, decode_jpeg

    for encoded, row in zip(data, rows, strict=True):
        left, top, right, bottom, width, height, *_ = row.tolist()
        image = decode_jpeg(
            torch.frombuffer(bytearray(encoded), dtype=torch.uint8), ImageReadMode.RGB, device=device
        )
        crop = image[None, :, top:bottom, left:right].float()
        resized = F.interpolate(crop, (height, width), mode="bilinear", antialias=True)
        pixels = resized.round().clamp(0, 255).to(torch.uint8)[0].permute(1, 2, 0).cpu().numpy()
        yield turned(pixels, row, size)


# Counting


@dataclass(frozen=True)
class Difference:
    """The differences between a path's crops and Pillow's, over a whole set."""

    values: int = 0
    equal: int = 0
    total: int = 0
    largest: int = 0
    images: int = 0
    same_images: int = 0

    def with_pair(self, made: Pixels, right: Pixels) -> Difference:
        """This and one more window."""
        assert made.shape == right.shape, (made.shape, right.shape)
        apart = np.abs(made.astype(np.int16) - right)
        return Difference(
            self.values + apart.size,
            self.equal + int((apart == 0).sum()),
            self.total + int(apart.sum()),
            max(self.largest, int(apart.max())),
            self.images + 1,
            self.same_images + (not apart.any()),
        )

    @property
    def exact(self) -> bool:
        return self.equal == self.values > 0

    def cells(self) -> str:
        """Cells of the table. Shows 100 % only if every single value is equal."""
        share = 100 * self.equal / self.values
        shown = "100 %" if self.exact else f"{min(share, 99.999):.3f} %"
        mean = self.total / self.values
        return f"{shown} | {mean:.3f} | {self.largest} | {self.same_images} of {self.images}"


def compare(made: Iterable[Pixels], reference: Sequence[Pixels]) -> Difference:
    """Compares all crops of a path with Pillow's."""
    found = Difference()
    for one, right in zip(made, reference, strict=True):
        found = found.with_pair(one, right)
    return found


def main() -> int:
    asked = _arguments()
    if asked.pure_windows:
        _pure_windows(asked)
        return 0
    torch.set_num_threads(1)
    device = pick_device(asked.small)
    photos = photographs(asked.path, made_up=asked.made_up)
    photos = Photos(photos.names[: asked.limit], photos.data[: asked.limit], photos.description)
    print(
        f"{machine(device)}\n{photos.description}; using {len(photos.data)}; reference: Pillow {PIL.__version__}\n"
    )
    training = Transform(asked.size, "crop-flip", resize=VERSION)
    found: dict[str, dict[str, Difference]] = {}
    with tempfile.TemporaryDirectory(prefix="drumline-pixels-") as temporary:
        folder = Path(temporary)
        source = lay_in_folders(photos, folder)
        sizes = np.array([Image.open(io.BytesIO(data)).size for data in photos.data], np.int32)
        for title, transform in (("training", training), ("evaluation", replace(training, augment="none"))):
            rows = transform.geometry(0, 0, np.arange(len(photos.data)), sizes)
            reference = [
                pillow_window(Image.open(io.BytesIO(data)), row, asked.size)
                for data, row in zip(photos.data, rows, strict=True)
            ]
            for name, windows in ways(
                photos, rows, transform, source, folder, device, show_skipped=title == "training"
            ):
                try:
                    found.setdefault(name, {})[title] = compare(windows, reference)
                except Exception as error:
                    if name.startswith("Drumline"):
                        raise
                    print(f"{name}: skipped: it failed ({brief(error)})")
                print(f"{title}: {name} done", file=sys.stderr, flush=True)
    head = "equal values | mean difference | largest | whole images equal"
    print(f"\n| path | training crops: {head} | evaluation view: {head} |\n|---{8 * '|---'}|")
    for name, by_view in found.items():
        if len(by_view) == 2:
            print(f"| {name} | {by_view['training'].cells()} | {by_view['evaluation'].cells()} |")
    ours = [one for name, by_view in found.items() if "Drumline" in name for one in by_view.values()]
    if all(one.exact for one in ours):
        print("\nDrumline: every value of every image equals Pillow's")
        return 0
    print("\nDrumline differs from Pillow", file=sys.stderr)
    return 1


def ways(
    photos: Photos,
    rows: NDArray[np.int32],
    transform: Transform,
    source: EncodedDataset,
    folder: Path,
    device: torch.device,
    show_skipped: bool,
) -> Iterator[tuple[str, Iterable[Pixels]]]:
    """Every path with its crops of all photographs. `show_skipped` prints the skipped ones."""
    missing: list[str] = []
    workers = LoaderWorkers("threads", usable_cores())
    yield "Drumline, loader's threads", by_loader(source, folder, transform, workers, torch.device("cpu"))
    yield "Drumline, without the native extension", without_native_part(folder, transform)
    if reason := gpu_unavailable(device):
        missing.append(f"Drumline, GPU decode: skipped ({reason})")
    else:
        on_gpu = sum(layout_of_file(data) is not None for data in photos.data)
        name = f"Drumline, GPU decode ({on_gpu} of {len(photos.data)} decoded there)"
        yield name, by_loader(source, folder, transform, replace(workers, decode="gpu"), device)
    each, more = cutters(transform)
    for name, way in each.items():
        yield name, (way(data, row, transform.size) for data, row in zip(photos.data, rows, strict=True))
    for module, name, batchwise in (
        ("nvidia.dali", f"DALI, decode on the {'GPU' if device.type == 'cuda' else 'CPU'}", by_dali),
        ("torchvision", "torchvision nvJPEG + torch float antialias on the GPU", by_nvjpeg),
    ):
        try:
            __import__(module)
            if batchwise is by_nvjpeg and device.type != "cuda":
                raise ImportError("no GPU")
        except Exception as error:
            missing.append(f"{name}: skipped ({brief(error)})")
            continue
        yield name, batchwise(photos.data, rows, transform.size, device)
    if show_skipped:
        print("\n".join(missing + more))


def _arguments() -> argparse.Namespace:
    parser = Parser(__doc__, made_up=3, size=64)
    parser.add_argument("--path", help="folder or tar of photographs; default: synthetic ones")
    parser.add_argument("--limit", type=int, help="use only this many photographs")
    parser.add_argument(
        "--made-up", type=int, default=64, help="number of synthetic photographs without --path"
    )
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--transform", default="crop-flip", help=argparse.SUPPRESS)
    parser.add_argument("--pure-windows", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
