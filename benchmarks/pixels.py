"""Whose pixels are Pillow's? Every path's crop and resize beside Pillow's, pixel by pixel.

A network trained on one library's pixels and run on another's sees other images: each library has its own idea of
"bilinear". So for each photograph Pillow decodes, crops, resizes and mirrors, and each contestant does the same with
the same box. The table says which share of all values (3 per pixel) is exactly equal, and how far the rest is away.
Training crops (random resized crop, mirror) and the evaluation view (short side 256, centre 224) are counted apart.
Drumline has to be at 100 %: the script ends with status 1 if a single value differs.

    python benchmarks/pixels.py --path photos.tar
    python benchmarks/pixels.py                      # made-up photographs

The contestants that are not installed are left out, each with a line that says so. The first part of this file (the
photographs, the reference, the machine's name) is shared by the other feed benchmarks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image

from drumline import native
from drumline.data.choose import gpu_unavailable
from drumline.data.decode import decode
from drumline.data.gpu.rule import layout_of
from drumline.data.jpeg import read_header
from drumline.data.ledger import Ledger
from drumline.data.loader import Workers, batches
from drumline.data.order import evaluation_requests
from drumline.data.resize import Filter, Version
from drumline.data.sources import EncodedSource, SourceSpec, open_source
from drumline.data.sources.folder import EXTENSIONS
from drumline.data.views import View
from drumline.data.window import cut, window_of
from drumline.launch.machine import usable_cores

Pixels = NDArray[np.uint8]
Row = NDArray[np.int32]
VERSION: Version = "pillow13" if int(PIL.__version__.split(".")[0]) >= 13 else "pillow12"
"""The pass order of the Pillow that is installed here: the reference is what it really does."""
LIBRARIES = (
    *("torch", "pillow", "numpy", "torchvision", "timm", "nvidia-dali-cuda120", "nvidia-dali-cuda130"),
    *("opencv-python-headless", "opencv-python", "simplejpeg", "pyvips", "spdl-io"),
)


class Photos(NamedTuple):
    """Encoded images, and a sentence about them."""

    names: list[str]
    data: list[bytes]
    told: str


def photographs(path: str | None, made_up: int = 64) -> Photos:
    """The images in a folder (at any depth) or a tar archive, sorted by name; without a path, made-up ones."""
    if path is None:
        data = [made_up_photograph(number) for number in range(made_up)]
        return Photos(
            [f"made_up_{number:04}.jpg" for number in range(made_up)],
            data,
            f"{made_up} made-up photographs (no --path given), mean {_kilobytes(data)} KB: "
            "figures for real ones differ",
        )
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.name.lower().endswith(EXTENSIONS))
        found = [(file.name, file.read_bytes()) for file in files]
    else:
        with tarfile.open(place) as archive:
            members = sorted(
                (member for member in archive if member.isfile()), key=lambda member: member.name
            )
            found = [
                (Path(member.name).name, stream.read())
                for member in members
                if member.name.lower().endswith(EXTENSIONS) and (stream := archive.extractfile(member))
            ]
    if not found:
        raise SystemExit(f"{path} holds no images ({' '.join(EXTENSIONS)})")
    names, data = [name for name, _ in found], [data for _, data in found]
    return Photos(names, data, f"{len(names)} photographs of {place.name}, mean {_kilobytes(data)} KB")


def made_up_photograph(number: int) -> bytes:
    """A JPEG with shapes, shades and grain, about as large as an ImageNet photograph; the same on every machine.
    Of ten, seven are 4:4:4, two 4:2:0 and one is grey, much like ImageNet."""
    draw = np.random.default_rng(number)
    width, height = int(draw.integers(320, 560)), int(draw.integers(300, 480))
    picture = np.zeros((height, width, 3))
    for cells, strength in ((3, 90), (12, 45), (50, 25)):
        coarse = draw.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        layer = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
        picture += strength / 160 * layer
    picture += draw.integers(-9, 10, picture.shape)
    image = Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8))
    kind, stream = number % 10, io.BytesIO()
    image = image.convert("L") if kind == 9 else image
    image.save(stream, "JPEG", quality=93, subsampling=2 if kind in (7, 8) else 0)
    return stream.getvalue()


def machine(device: torch.device | None = None) -> str:
    """Processor, cores, GPU and versions, in a line."""
    parts = [_processor(), f"{usable_cores()} cores"]
    if device is not None and device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    parts += [f"{name} {version}" for name in LIBRARIES if (version := installed(name))]
    return ", ".join([*parts, f"Python {platform.python_version()}", f"native part {native.describe()}"])


def installed(distribution: str) -> str:
    """A distribution's version, or nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def pillow_window(image: Image.Image, row: Row, size: int, filter: Filter = "bilinear") -> Pixels:
    """What a geometry row asks for, done by Pillow alone: the reference."""
    left, top, right, bottom, width, height, x, y, mirror = row.tolist()
    kind = Image.Resampling[filter.upper()]
    resized = image.convert("RGB").crop((left, top, right, bottom)).resize((width, height), kind)
    window = resized.crop((x, y, x + size, y + size))
    return np.asarray(window.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else window)


def _kilobytes(data: Sequence[bytes]) -> str:
    return f"{statistics.mean(map(len, data)) / 1000:.0f}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )


# The ways from bytes to a window: each does all of it, so that feed_cpu.py can time them as they are

Cutter = Callable[[bytes, Row, int], Pixels]
"""(encoded image, geometry row, side) to the window."""
PILLOW, DRUMLINE = "Pillow crop + resize", "Drumline, native"


def cutters(view: View) -> tuple[dict[str, Cutter], list[str]]:
    """The ways that work here, by name, and a line for each that does not."""
    found: dict[str, Cutter] = {
        PILLOW: lambda data, row, size: pillow_window(Image.open(io.BytesIO(data)), row, size),
        "Pillow resize(box=)": _pillow_box,
        "Pillow decode + Drumline resize": lambda data, row, _: cut(np.asarray(decode(data, "")), row, view),
        DRUMLINE: lambda data, row, _: window_of(data, "", view, lambda sizes: row[None]),
        "torch uint8 antialias": lambda data, row, size: _window(_by_torch(_decoded(data), row), row, size),
        "torch float antialias + round": lambda data, row, size: _window(
            _by_torch(_decoded(data), row, torch.float32), row, size
        ),
    }
    missing = []
    for make in (_torchvision, _simplejpeg, _opencv, _vips, _spdl):
        try:
            ways = make()
            for way in ways.values():  # some libraries fail only when first used
                way(made_up_photograph(0), np.array([8, 8, 208, 158, 64, 64, 0, 0, 0], np.int32), 64)
            found |= ways
        except Exception as error:  # not installed, or it does not fit: nearly anything
            missing.append(f"{make.__name__[1:]}: left out ({_brief(error)})")
    return found, missing


def _decoded(data: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def _window(resized: Pixels, row: Row, size: int) -> Pixels:
    x, y, mirror = row[6:].tolist()
    window = resized[y : y + size, x : x + size]
    return np.ascontiguousarray(window[:, ::-1] if mirror else window)


def _pillow_box(data: bytes, row: Row, size: int) -> Pixels:
    left, top, right, bottom, width, height, *_ = row.tolist()
    image = Image.open(io.BytesIO(data)).convert("RGB")
    resized = image.resize((width, height), Image.Resampling.BILINEAR, box=(left, top, right, bottom))
    return _window(np.asarray(resized), row, size)


def _by_torch(image: Pixels, row: Row, kind: torch.dtype = torch.uint8) -> Pixels:
    left, top, right, bottom, width, height, *_ = row.tolist()
    crop = torch.from_numpy(image[top:bottom, left:right].copy()).permute(2, 0, 1)[None].to(kind)
    resized = F.interpolate(crop, (height, width), mode="bilinear", antialias=True)
    if kind != torch.uint8:
        resized = resized.round().clamp(0, 255).to(torch.uint8)
    return resized[0].permute(1, 2, 0).numpy()


def _torchvision() -> dict[str, Cutter]:
    from torchvision.transforms.v2 import functional

    def cut_by(image: Any, row: Row) -> Any:
        left, top, right, bottom, width, height, *_ = row.tolist()
        return functional.resized_crop(
            image, top, left, bottom - top, right - left, [height, width], antialias=True
        )

    def of_tensor(data: bytes, row: Row, size: int) -> Pixels:
        image = torch.from_numpy(_decoded(data).copy()).permute(2, 0, 1)
        return _window(cut_by(image, row).permute(1, 2, 0).numpy(), row, size)

    def of_image(data: bytes, row: Row, size: int) -> Pixels:
        return _window(np.asarray(cut_by(Image.open(io.BytesIO(data)).convert("RGB"), row)), row, size)

    return {"torchvision v2, PIL image": of_image, "torchvision v2, tensor": of_tensor}


def _simplejpeg() -> dict[str, Cutter]:
    import simplejpeg

    def way(data: bytes, row: Row, size: int) -> Pixels:
        image = Image.fromarray(simplejpeg.decode_jpeg(data, "RGB"))
        return pillow_window(image, row, size)

    def torch_way(data: bytes, row: Row, size: int) -> Pixels:
        return _window(_by_torch(simplejpeg.decode_jpeg(data, "RGB"), row), row, size)

    return {"simplejpeg + Pillow resize": way, "simplejpeg + torch uint8 antialias": torch_way}


def _opencv() -> dict[str, Cutter]:
    import cv2

    cv2.setNumThreads(1)

    def by(method: int) -> Cutter:
        def way(data: bytes, row: Row, size: int) -> Pixels:
            left, top, right, bottom, width, height, *_ = row.tolist()
            flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
            image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
            resized = cv2.resize(image[top:bottom, left:right], (width, height), interpolation=method)
            return _window(cv2.cvtColor(resized, cv2.COLOR_BGR2RGB), row, size)

        return way

    return {"OpenCV LINEAR": by(cv2.INTER_LINEAR), "OpenCV AREA": by(cv2.INTER_AREA)}


def _vips() -> dict[str, Cutter]:
    import pyvips

    def way(data: bytes, row: Row, size: int) -> Pixels:
        left, top, right, bottom, width, height, *_ = row.tolist()
        wide, high = right - left, bottom - top
        image = pyvips.Image.new_from_buffer(data, "").colourspace("srgb").crop(left, top, wide, high)
        return _window(image.resize(width / wide, vscale=height / high, kernel="linear").numpy(), row, size)

    return {"pyvips, linear": way}


def _spdl() -> dict[str, Cutter]:
    from spdl import io as spdl_io

    def way(data: bytes, row: Row, size: int) -> Pixels:
        left, top, right, bottom, width, height, *_ = row.tolist()
        steps = (
            f"crop={right - left}:{bottom - top}:{left}:{top}:exact=1,scale={width}:{height}:flags=bilinear"
        )
        buffer = spdl_io.load_image(data, filter_desc=f"{steps},format=rgb24")
        return _window(spdl_io.to_numpy(buffer), row, size)

    return {"SPDL (ffmpeg), bilinear": way}


# Whole sets: the loader itself, and libraries that take batches


def lay_in_folders(photos: Photos, folder: Path) -> EncodedSource:
    """The photographs as a source whose sample ids are their positions."""
    for number, (name, data) in enumerate(zip(photos.names, photos.data, strict=True)):
        place = folder / ("a" if 2 * number < len(photos.data) else "b")
        place.mkdir(exist_ok=True)
        (place / f"{number:06}_{name}").write_bytes(data)
    source = open_source(SourceSpec("folder", str(folder), "train"))
    assert isinstance(source, EncodedSource)
    return source


def by_loader(
    source: EncodedSource, folder: Path, view: View, workers: Workers, device: torch.device
) -> Iterator[Pixels]:
    """Every sample once, in order, through the loader that training uses."""
    requests = evaluation_requests(samples=len(source), batch=64, rank=0, world=1)
    spec, ledger = SourceSpec("folder", str(folder), "train"), Ledger("pixels", len(source), 0.0)
    with closing(batches(spec, source, view, 0, requests, workers, device, ledger)) as feed:
        for batch in feed:
            yield from batch.images.cpu().numpy()


def without_native_part(folder: Path, view: View) -> Iterator[Pixels]:
    """What Drumline makes in a process that leaves its native part out."""
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        command = [sys.executable, __file__, "--pure-windows", file.name, "--path", str(folder)]
        command += ["--view", view.augment, "--size", str(view.size)]
        subprocess.run(command, check=True, env={**os.environ, "DRUMLINE_NATIVE": "0"})
        yield from np.load(file.name)


def _pure_windows(asked: argparse.Namespace) -> None:
    """The other side of `without_native_part`."""
    assert not native.available()
    view = View(asked.size, asked.view, resize=VERSION)
    source = open_source(SourceSpec("folder", asked.path, "train"))
    assert isinstance(source, EncodedSource)
    made = by_loader(source, Path(asked.path), view, Workers("threads", 0), torch.device("cpu"))
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
            yield _window(np.asarray(made.at(place)), rows[i], size)


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
        yield _window(pixels, row, size)


# Counting


@dataclass(frozen=True)
class Difference:
    """How far a way's windows are from Pillow's, over a whole set."""

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
        """For the table. 100 % is written only when every single value is equal."""
        share = 100 * self.equal / self.values
        shown = "100 %" if self.exact else f"{min(share, 99.999):.3f} %"
        mean = self.total / self.values
        return f"{shown} | {mean:.3f} | {self.largest} | {self.same_images} of {self.images}"


def compare(made: Iterable[Pixels], reference: Sequence[Pixels]) -> Difference:
    """All windows of a way beside Pillow's."""
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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    photos = photographs(asked.path, made_up=asked.made_up)
    photos = Photos(photos.names[: asked.limit], photos.data[: asked.limit], photos.told)
    print(
        f"{machine(device)}\n{photos.told}; {len(photos.data)} of them taken; reference: Pillow {PIL.__version__}\n"
    )
    training = View(asked.size, "crop-flip", resize=VERSION)
    found: dict[str, dict[str, Difference]] = {}
    with tempfile.TemporaryDirectory(prefix="drumline-pixels-") as temporary:
        folder = Path(temporary)
        source = lay_in_folders(photos, folder)
        sizes = np.array([Image.open(io.BytesIO(data)).size for data in photos.data], np.int32)
        for title, view in (("training", training), ("evaluation", replace(training, augment="none"))):
            rows = view.geometry(0, 0, np.arange(len(photos.data)), sizes)
            reference = [
                pillow_window(Image.open(io.BytesIO(data)), row, asked.size)
                for data, row in zip(photos.data, rows, strict=True)
            ]
            for name, windows in ways(photos, rows, view, source, folder, device, tell=title == "training"):
                try:
                    found.setdefault(name, {})[title] = compare(windows, reference)
                except Exception as error:
                    if name.startswith("Drumline"):
                        raise
                    print(f"{name}: left out, it failed ({_brief(error)})")
                print(f"{title}: {name} done", file=sys.stderr, flush=True)
    head = "equal values | mean difference | largest | whole images equal"
    print(f"\n| path | training crops: {head} | evaluation view: {head} |\n|---{8 * '|---'}|")
    for name, by_view in found.items():
        if len(by_view) == 2:
            print(f"| {name} | {by_view['training'].cells()} | {by_view['evaluation'].cells()} |")
    ours = [one for name, by_view in found.items() if "Drumline" in name for one in by_view.values()]
    if all(one.exact for one in ours):
        print("\nDrumline: every value of every image is Pillow's")
        return 0
    print("\nDrumline differs from Pillow", file=sys.stderr)
    return 1


def ways(
    photos: Photos,
    rows: NDArray[np.int32],
    view: View,
    source: EncodedSource,
    folder: Path,
    device: torch.device,
    tell: bool,
) -> Iterator[tuple[str, Iterable[Pixels]]]:
    """Every way, with its windows of all photographs; `tell` prints what is left out."""
    missing: list[str] = []
    workers = Workers("threads", usable_cores())
    yield "Drumline, loader's threads", by_loader(source, folder, view, workers, torch.device("cpu"))
    yield "Drumline, without its native part", without_native_part(folder, view)
    if reason := gpu_unavailable(device):
        missing.append(f"Drumline, GPU decode: left out ({reason})")
    else:
        on_gpu = sum(
            (header := read_header(data)) is not None and layout_of(header) is not None
            for data in photos.data
        )
        name = f"Drumline, GPU decode ({on_gpu} of {len(photos.data)} decoded there)"
        yield name, by_loader(source, folder, view, replace(workers, gpu=True), device)
    each, more = cutters(view)
    for name, way in each.items():
        yield name, (way(data, row, view.size) for data, row in zip(photos.data, rows, strict=True))
    for module, name, batchwise in (
        ("nvidia.dali", f"DALI, decode on the {'GPU' if device.type == 'cuda' else 'CPU'}", by_dali),
        ("torchvision", "torchvision nvJPEG + torch float antialias on the GPU", by_nvjpeg),
    ):
        try:
            __import__(module)
            if batchwise is by_nvjpeg and device.type != "cuda":
                raise ImportError("no GPU")
        except Exception as error:
            missing.append(f"{name}: left out ({_brief(error)})")
            continue
        yield name, batchwise(photos.data, rows, view.size, device)
    if tell:
        print("\n".join(missing + more))


def _brief(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", help="folder or tar of photographs; without it, made-up ones")
    parser.add_argument("--limit", type=int, help="take only so many")
    parser.add_argument("--made-up", type=int, default=64, help="how many to make up without --path")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--view", default="crop-flip", help=argparse.SUPPRESS)
    parser.add_argument("--pure-windows", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
