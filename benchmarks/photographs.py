"""What the feed benchmarks share: photographs (real or synthetic), Pillow's crops of them, and the machine's name."""

from __future__ import annotations

import importlib.metadata
import io
import platform
import statistics
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image

from drumline import native
from drumline.core.machine import usable_cores
from drumline.data.image.resize import Filter, Version
from drumline.data.sources import DatasetSpec, EncodedDataset, open_dataset
from drumline.data.sources.folder import EXTENSIONS

Pixels = NDArray[np.uint8]
Row = NDArray[np.int32]
VERSION: Version = "pillow13" if int(PIL.__version__.split(".")[0]) >= 13 else "pillow12"
"""The pass order of the installed Pillow, which is the reference."""
LIBRARIES = (
    *("torch", "pillow", "numpy", "torchvision", "timm", "nvidia-dali-cuda120", "nvidia-dali-cuda130"),
    *("opencv-python-headless", "opencv-python", "simplejpeg", "pyvips", "spdl-io"),
)


class Photos(NamedTuple):
    """Encoded images and a description of them."""

    names: list[str]
    data: list[bytes]
    description: str


def photographs(path: str | None, made_up: int = 64) -> Photos:
    """The images in a folder (at any depth) or a tar archive, sorted by name; without a path, synthetic ones."""
    if path is None:
        data = [made_up_photograph(number) for number in range(made_up)]
        return Photos(
            [f"made_up_{number:04}.jpg" for number in range(made_up)],
            data,
            f"{made_up} synthetic photographs (no --path given), mean {_kilobytes(data)} KB: "
            "results for real ones differ",
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


def lay_in_folders(photos: Photos, folder: Path) -> EncodedDataset:
    """The photographs as a source whose sample ids are their positions."""
    for number, (name, data) in enumerate(zip(photos.names, photos.data, strict=True)):
        place = folder / ("a" if 2 * number < len(photos.data) else "b")
        place.mkdir(exist_ok=True)
        (place / f"{number:06}_{name}").write_bytes(data)
    source = open_dataset(DatasetSpec("folder", str(folder), "train"))
    assert isinstance(source, EncodedDataset)
    return source


def machine(device: torch.device | None = None) -> str:
    """Processor, cores, GPU and versions, in a line."""
    parts = [_processor(), f"{usable_cores()} cores"]
    if device is not None and device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    parts += [f"{name} {version}" for name in LIBRARIES if (version := installed(name))]
    return ", ".join([*parts, f"Python {platform.python_version()}", f"native extension {native.describe()}"])


def installed(distribution: str) -> str:
    """A distribution's version, or an empty string."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def pillow_window(image: Image.Image, row: Row, size: int, filter: Filter = "bilinear") -> Pixels:
    """The result of a geometry row, made by Pillow alone: the reference."""
    left, top, right, bottom, width, height, x, y, mirror = row.tolist()
    kind = Image.Resampling[filter.upper()]
    resized = image.convert("RGB").crop((left, top, right, bottom)).resize((width, height), kind)
    window = resized.crop((x, y, x + size, y + size))
    return np.asarray(window.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else window)


def brief(error: Exception) -> str:
    """An error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


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
