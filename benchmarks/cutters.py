"""Ways to turn one encoded image into a crop: Pillow's, Drumline's and those of other libraries.

Each does everything (decode, crop, resize, mirror), so that pixels.py can compare the results and feed_cpu.py can
time them. A library that is not installed, or does not work here, is skipped with a line that says so.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from drumline.data.feed.batch import crop_encoded, cut
from drumline.data.feed.transform import Transform
from drumline.data.image.decode import decode
from photographs import Pixels, Row, brief, made_up_photograph, pillow_window

Cutter = Callable[[bytes, Row, int], Pixels]
"""(encoded image, geometry row, side) to the window."""
PILLOW, DRUMLINE = "Pillow crop + resize", "Drumline, native"


def cutters(transform: Transform) -> tuple[dict[str, Cutter], list[str]]:
    """The cutters that work here, by name, and a line for each that does not."""
    found: dict[str, Cutter] = {
        PILLOW: lambda data, row, size: pillow_window(Image.open(io.BytesIO(data)), row, size),
        "Pillow resize(box=)": _pillow_box,
        "Pillow decode + Drumline resize": lambda data, row, _: cut(
            np.asarray(decode(data, "")), row, transform
        ),
        DRUMLINE: lambda data, row, _: crop_encoded(data, "", transform, lambda sizes: row[None]),
        "torch uint8 antialias": lambda data, row, size: turned(_by_torch(_decoded(data), row), row, size),
        "torch float antialias + round": lambda data, row, size: turned(
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
        except Exception as error:  # not installed or incompatible: nearly any exception
            missing.append(f"{make.__name__[1:]}: skipped ({brief(error)})")
    return found, missing


def _decoded(data: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def turned(resized: Pixels, row: Row, size: int) -> Pixels:
    """The last steps of a geometry row: the window of the resized image, mirrored if the row says so."""
    x, y, mirror = row[6:].tolist()
    window = resized[y : y + size, x : x + size]
    return np.ascontiguousarray(window[:, ::-1] if mirror else window)


def _pillow_box(data: bytes, row: Row, size: int) -> Pixels:
    left, top, right, bottom, width, height, *_ = row.tolist()
    image = Image.open(io.BytesIO(data)).convert("RGB")
    resized = image.resize((width, height), Image.Resampling.BILINEAR, box=(left, top, right, bottom))
    return turned(np.asarray(resized), row, size)


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
        return turned(cut_by(image, row).permute(1, 2, 0).numpy(), row, size)

    def of_image(data: bytes, row: Row, size: int) -> Pixels:
        return turned(np.asarray(cut_by(Image.open(io.BytesIO(data)).convert("RGB"), row)), row, size)

    return {"torchvision v2, PIL image": of_image, "torchvision v2, tensor": of_tensor}


def _simplejpeg() -> dict[str, Cutter]:
    import simplejpeg

    def way(data: bytes, row: Row, size: int) -> Pixels:
        image = Image.fromarray(simplejpeg.decode_jpeg(data, "RGB"))
        return pillow_window(image, row, size)

    def torch_way(data: bytes, row: Row, size: int) -> Pixels:
        return turned(_by_torch(simplejpeg.decode_jpeg(data, "RGB"), row), row, size)

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
            return turned(cv2.cvtColor(resized, cv2.COLOR_BGR2RGB), row, size)

        return way

    return {"OpenCV LINEAR": by(cv2.INTER_LINEAR), "OpenCV AREA": by(cv2.INTER_AREA)}


def _vips() -> dict[str, Cutter]:
    import pyvips

    def way(data: bytes, row: Row, size: int) -> Pixels:
        left, top, right, bottom, width, height, *_ = row.tolist()
        wide, high = right - left, bottom - top
        image = pyvips.Image.new_from_buffer(data, "").colourspace("srgb").crop(left, top, wide, high)
        return turned(image.resize(width / wide, vscale=height / high, kernel="linear").numpy(), row, size)

    return {"pyvips, linear": way}


def _spdl() -> dict[str, Cutter]:
    from spdl import io as spdl_io

    def way(data: bytes, row: Row, size: int) -> Pixels:
        left, top, right, bottom, width, height, *_ = row.tolist()
        steps = (
            f"crop={right - left}:{bottom - top}:{left}:{top}:exact=1,scale={width}:{height}:flags=bilinear"
        )
        buffer = spdl_io.load_image(data, filter_desc=f"{steps},format=rgb24")
        return turned(spdl_io.to_numpy(buffer), row, size)

    return {"SPDL (ffmpeg), bilinear": way}
