"""Is the rule for GPU decoding right? Compares every pixel of every accepted JPEG with Pillow's.

`drumline.data.gpu.layout` decides from a JPEG's header whether the GPU decodes it to Pillow's bits. This script tests
the rule on photographs, on crops of them written in every kind of JPEG (jpeg_kinds.py; qualities 1 to 100, sides from
1 pixel), on noise, on pure colours and on very large images. The GPU also decodes the kinds that the rule leaves to
the CPU, to show that they differ. Exits with 1 if one pixel of one accepted file differs.

    python benchmarks/jpeg_rule.py --path photos.tar
    python benchmarks/jpeg_rule.py --dry                 # without a GPU: makes the files and applies only the rule
    python benchmarks/jpeg_rule.py --small               # the same with few files: a check that the script works
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from drumline.data.feed.choose import gpu_unavailable
from drumline.data.gpu.layout import Places, PlaneLayout, decodes_equal, layout_of, layout_of_file, place
from drumline.data.gpu.nvjpeg import PlaneDecoder
from drumline.data.image.jpeg import JpegHeader, chroma, read_header
from harness import Parser
from jpeg_kinds import jpeg, unusual_samplings, usual_kinds
from photographs import Pixels, machine, photographs

CHUNK_BYTES = 40_000_000
"""Compressed bytes decoded in one call."""
TILES = 4096
"""Windows per kernel launch."""
FORCED = {
    "grey": PlaneLayout.GREY,
    "444": PlaneLayout.YCC_444,
    "422": PlaneLayout.YCC_422,
    "420": PlaneLayout.YCC_420,
    "440": PlaneLayout.YCC_440,
    "other": PlaneLayout.YCC_422,
}
"""The layouts for files that the rule rejects, by their chroma; 4:1:1 gets more memory than it needs."""


class Sample(NamedTuple):
    """A file to test."""

    origin: str
    kind: str
    data: bytes


@dataclass
class Count:
    """The results for all files of a kind."""

    files: int = 0
    equal: int = 0
    rejected: int = 0
    largest: int = 0
    reasons: set[str] = field(default_factory=set)


def main() -> int:
    asked = _arguments()
    device = torch.device("cuda", 0)
    if not asked.dry and (
        reason := gpu_unavailable(device) if torch.cuda.is_available() else "no CUDA device"
    ):
        print(f"cannot decode on the GPU: {reason} (--dry applies only the rule)", file=sys.stderr)
        return 2
    if asked.small:
        print("needs CUDA: skipped decoding by the GPU")
    began, photos = time.perf_counter(), photographs(asked.path)
    print(f"{machine(None if asked.dry else device)}\n{photos.description}\n", flush=True)
    counts: dict[tuple[bool, str, str], Count] = {}
    for chunk in _chunks(corpus(photos.data, asked.crops)):
        headers = [_header(sample.data) for sample in chunk]
        apart: Sequence[int | None] = [0] * len(chunk) if asked.dry else differences(chunk, headers, device)
        for sample, header, difference in zip(chunk, headers, apart, strict=True):
            accepted = layout_of_file(sample.data) is not None
            count = counts.setdefault((accepted, sample.origin, sample.kind), Count())
            count.files += 1
            if not accepted:
                count.reasons.add(decodes_equal(header) or "restart markers out of place")
            count.rejected += difference is None
            count.equal += difference == 0
            count.largest = max(count.largest, difference or 0)
        done = sum(count.files for count in counts.values())
        print(f"{done:,} files   [{time.perf_counter() - began:.0f} s]", file=sys.stderr, flush=True)
    return _report(counts, asked.dry)


def corpus(photos: Sequence[bytes], crops: int) -> Iterator[Sample]:
    """All files: the photographs, then the files made from them."""
    for data in photos:
        yield Sample("photographs", "original", data)
    draw = np.random.default_rng(0)
    for number in range(crops):
        photo = Image.open(io.BytesIO(photos[number % len(photos)])).convert("RGB")
        small = number % 2
        longest = 40 if small else 600
        width, height = (min(int(draw.integers(1, longest + 1)), side) for side in photo.size)
        left, top = int(draw.integers(photo.width - width + 1)), int(draw.integers(photo.height - height + 1))
        crop = _touched(photo.crop((left, top, left + width, top + height)), number, draw)
        quality = int(draw.choice([1, 5, 25, 50, 75, 85, 90, 95, 100]))
        origin = "crops, sides of 1 to 40" if small else "crops, sides of 1 to 600"
        for kind, data in usual_kinds(crop, quality, draw).items():
            yield Sample(origin, kind, data)
        for kind, data in unusual_samplings(draw).items():
            yield Sample("blocks rearranged", kind, data)
    for width, height in ((16_384, 40), (40, 16_384), (6_000, 4_000), (4_000, 6_000)):
        coarse = draw.integers(0, 256, (height // 30 + 2, width // 30 + 2, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        for sampling in ("4:4:4", "4:2:2", "4:2:0"):
            yield Sample("large", f"{width} x {height}", jpeg(image, 90, subsampling=sampling))


def differences(
    samples: Sequence[Sample], headers: Sequence[JpegHeader], device: torch.device
) -> list[int | None]:
    """The largest difference of each file from Pillow's pixels, or None if the engine rejects the file."""
    layouts = np.array([_forced(header) for header in headers])
    sides = np.array([(header.width, header.height) for header in headers])
    places = place(layouts, sides[:, 0], sides[:, 1])
    lengths = np.array([len(sample.data) for sample in samples])
    arena = torch.full((places.end,), 171, dtype=torch.uint8, device=device)
    torch.cuda.current_stream(device).synchronize()  # the engine would not wait for the fill
    encoded = np.frombuffer(b"".join(sample.data for sample in samples), np.uint8)
    statuses = _decoder(device).decode(encoded, np.cumsum(lengths) - lengths, lengths, arena, places)
    return [
        None
        if status
        else int(np.abs(whole_image(arena, places, number).astype(np.int16) - _by_pillow(sample.data)).max())
        for number, (sample, status) in enumerate(zip(samples, statuses.tolist(), strict=True))
    ]


def whole_image(arena: torch.Tensor, places: Places, number: int) -> Pixels:
    """A decoded image through the kernel that training uses, at its own size: square windows laid side by side."""
    width, height = int(places.width[number]), int(places.height[number])
    side = 1 << min(width, height, 256).bit_length() - 1
    lefts, tops = ([*range(0, end - side, side), end - side] for end in (width, height))
    corners = np.array([(x, y) for y in tops for x in lefts], np.int32)
    image = np.empty((height, width, 3), np.uint8)
    for first in range(0, len(corners), TILES):
        some = corners[first : first + TILES]
        geometry = np.zeros((len(some), 9), np.int32)
        geometry[:, 2:6], geometry[:, 6:8] = (width, height, width, height), some
        windows = torch.empty((len(some), side, side, 3), dtype=torch.uint8, device=arena.device)
        _resampler(arena.device, side)(arena, places.rows(np.full(len(some), number)), geometry, windows)
        for (x, y), window in zip(some.tolist(), windows.cpu().numpy(), strict=True):
            image[y : y + side, x : x + side] = window
    return image


@cache
def _decoder(device: torch.device) -> PlaneDecoder:
    return PlaneDecoder(device)


@cache
def _resampler(device: torch.device, side: int) -> Any:
    from drumline.data.gpu.resample import Resampler  # needs Triton, which --dry does without

    return Resampler(device, side)


def _forced(header: JpegHeader) -> PlaneLayout:
    """The layout of a file, or the nearest one if the rule rejects it."""
    layout = layout_of(header)
    return layout if layout is not None else FORCED[chroma(header)]


def _header(data: bytes) -> JpegHeader:
    header = read_header(data)
    assert header is not None
    return header


def _by_pillow(data: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def _touched(image: Image.Image, number: int, draw: np.random.Generator) -> Image.Image:
    """Replaces some images with noise or pure colours, where rounding and clipping matter most."""
    if number % 5 == 3:
        return Image.fromarray(draw.integers(0, 256, (image.height, image.width, 3), dtype=np.uint8))
    if number % 5 == 4:
        return Image.fromarray(255 * (np.asarray(image) > 127).astype(np.uint8))
    return image


def _chunks(samples: Iterator[Sample]) -> Iterator[list[Sample]]:
    chunk: list[Sample] = []
    size = 0
    for sample in samples:
        chunk.append(sample)
        size += len(sample.data)
        if size > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _report(counts: dict[tuple[bool, str, str], Count], dry: bool) -> int:
    """Two tables, and the exit status."""
    for accepted, title in (
        (True, "Accepted by the rule"),
        (False, "Left to the CPU by the rule, decoded on the GPU here"),
    ):
        print(f"\n{title}\n\n| files | kind | number | equal | rejected by the engine | largest difference |")
        print(f"|---{5 * '|---'}|")
        for (of_accepted, origin, kind), count in counts.items():
            if of_accepted is accepted:
                kind = kind if accepted else f"{kind} ({'; '.join(sorted(count.reasons))})"
                result = "not tried | |" if dry else f"{count.equal} | {count.rejected} | {count.largest}"
                print(f"| {origin} | {kind} | {count.files} | {result} |")
    taken = [count for (accepted, _, _), count in counts.items() if accepted]
    files, equal = sum(count.files for count in taken), sum(count.equal for count in taken)
    if dry:
        print(f"\n{files:,} files accepted; none was decoded on a GPU")
        return 0
    print(f"\naccepted files equal to Pillow in every pixel: {equal:,} of {files:,}")
    return 0 if equal == files else 1


def _arguments() -> argparse.Namespace:
    parser = Parser(__doc__, dry=True, crops=6)
    parser.add_argument("--path", help="folder or tar of photographs; default: synthetic ones")
    parser.add_argument("--crops", type=int, default=60, help="pictures to write as every kind of JPEG")
    parser.add_argument(
        "--dry", action="store_true", help="without a GPU: only the rule's decision for each kind"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
