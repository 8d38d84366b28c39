"""Whether an exported file gives the same results as the original, from image files to probabilities.

The floor is the original's own noise: how far its outputs for the same images differ between batch sizes and numbers
of threads. The limit is the larger of `FLOOR_TIMES` the floor and `ROUNDINGS` times the machine epsilon of the
parameters' type. Both apply to logits, up to the constant that softmax ignores, because the probabilities of an
uncertain model hardly change even if it is wrong. Promises: the file is loaded by the code that `drumline predict`
uses; pixels must be equal; no image may change its class unless the original is undecided about it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumline.core.errors import UserError
from drumline.core.machine import usable_cores
from drumline.core.progress import progress
from drumline.inference.classifier import Classifier
from drumline.inference.export.load import ExportedModel
from drumline.inference.export.samples import Sample
from drumline.inference.model import TrainedModel

EXAMPLE_BATCH = 8
"""Batch with which a model is exported."""
BATCHES = (1, EXAMPLE_BATCH, 13)
"""Sizes that are verified: one image, the size of the export, and one that the exporter has not seen."""
BULK = 32
"""Batch in which all images are compared."""
FLOOR_TIMES = 8
ROUNDINGS = 4096
"""4.9e-4 for fp32. `benchmarks/export_matrix.py` shows how far correct files stay below it."""
UNSTABLE = 64
"""A floor above this multiple of the rounding limit is a fault of the model, not noise."""
VISIBLE = 1e-4
"""Smallest probability whose logit is compared."""
LATENCY_S = 1.0
"""Time for measuring the latency of a batch size."""


@dataclass(frozen=True)
class Difference:
    """The difference between two sets of outputs for the same images."""

    logits: float = 0.0
    probability_max: float = 0.0
    probability_mean: float = 0.0
    agree: int = 0
    """Images with the same most likely class."""
    undecided: int = 0
    """Images whose class changes between two that the original finds equally likely."""
    images: int = 0

    @property
    def agreement(self) -> float:
        """Fraction of images with the same most likely class."""
        return self.agree / max(1, self.images)

    @property
    def same_classes(self) -> bool:
        """Whether no image changes its class, apart from undecided ones."""
        return self.agree + self.undecided == self.images

    def __or__(self, other: Difference) -> Difference:
        """The difference over both sets of images."""
        images = self.images + other.images
        total = self.probability_mean * self.images + other.probability_mean * other.images
        return Difference(
            _worse(self.logits, other.logits),
            _worse(self.probability_max, other.probability_max),
            total / max(1, images),
            self.agree + other.agree,
            self.undecided + other.undecided,
            images,
        )


def difference(wanted: Tensor, found: Tensor, tie: float = 0.0) -> Difference:
    """The difference between `found` and `wanted`: probabilities, (images, outputs). The original is undecided
    between classes whose logits are closer than `tie`."""
    if not len(wanted):
        return Difference()
    one, other = wanted.double(), found.double()
    apart = (one - other).abs()
    smallest = torch.finfo(torch.float32).tiny
    logits = (one.clamp_min(smallest).log() - other.clamp_min(smallest).log()).abs()
    visible = torch.maximum(one, other) >= VISIBLE
    largest = torch.where(visible | logits.isnan(), logits, 0.0).max()
    same = one.argmax(dim=1) == other.argmax(dim=1)
    best, here = one.max(dim=1).values, one.gather(1, other.argmax(dim=1, keepdim=True))[:, 0]
    close = best.clamp_min(smallest).log() - here.clamp_min(smallest).log() <= tie
    return Difference(
        float(largest),
        float(apart.max()),
        float(apart.mean()),
        int(same.sum()),
        int((~same & close).sum()),
        len(wanted),
    )


def limit(floor: Difference, dtype: torch.dtype) -> float:
    """The largest difference in logits that counts as noise."""
    return max(FLOOR_TIMES * floor.logits, ROUNDINGS * torch.finfo(dtype).eps)


def dtype_of(model: TrainedModel) -> torch.dtype:
    """The coarsest floating-point type of the parameters, but at best fp32, in which predictions are compared."""
    types = {each.dtype for each in model.model.parameters() if each.is_floating_point()}
    return max({torch.float32, *types}, key=lambda each: torch.finfo(each).eps)


def measure_floor(model: TrainedModel, pixels: Tensor) -> Difference:
    """The noise of the original: with other batch sizes, in a second pass, and with one thread."""
    wanted, floor = answers(model, pixels), Difference()
    for batch in BATCHES:
        floor |= difference(wanted, answers(model, pixels, batch))
    floor |= difference(wanted, answers(model, pixels))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        floor |= difference(wanted, answers(model, pixels))
    finally:
        torch.set_num_threads(threads)
    return floor


def answers(model: Classifier, pixels: Tensor, batch: int = BULK) -> Tensor:
    """The probabilities for pixels, in batches of one size; the last one is padded to it."""
    found = []
    for part in pixels.split(batch):
        filled = part[torch.arange(batch) % len(part)] if batch != BULK else part
        result = model.from_pixels(filled)
        if result.shape != (len(filled), model.record.outputs):
            raise UserError(
                f"a batch of {len(filled)} returns the shape {tuple(result.shape)}, not "
                f"{(len(filled), model.record.outputs)}",
                "keep the batch dimension: x.view(x.shape[0], -1), or x.flatten(1)",
                "wrong-shape",
            )
        found.append(result[: len(part)])
    return torch.cat(found)


@dataclass
class Comparison:
    """The measurements of a verification."""

    floor: Difference
    limit: float
    whole: Difference = field(default_factory=Difference)
    by_batch: dict[int, Difference] = field(default_factory=dict)
    broken: int = 0
    other_pixels: str = ""
    """The first image whose pixels differ."""
    labelled: int = 0
    correct: int = 0
    exported_correct: int = 0
    other_size: str = ""
    latency: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Milliseconds of the original and of the file, by batch size."""

    @property
    def worst(self) -> Difference:
        worst = self.whole
        for each in self.by_batch.values():
            worst = Difference(
                _worse(worst.logits, each.logits), _worse(worst.probability_max, each.probability_max)
            )
        return worst

    @property
    def alike(self) -> bool:
        """Whether the file passes."""
        every = [self.whole, *self.by_batch.values()]
        agree = all(each.same_classes for each in every)
        return not self.other_pixels and agree and self.worst.logits <= self.limit

    def evidence(self, of: str) -> dict[str, Any]:
        """The results that the record of the file keeps."""
        accuracy = {
            "model": self.correct / max(1, self.labelled),
            "exported": self.exported_correct / max(1, self.labelled),
        }
        return {
            "images": self.whole.images,
            "of": of,
            "batches": sorted(self.by_batch),
            "top1_agreement": self.whole.agreement,
            "undecided": self.whole.undecided,
            "probability_difference": {
                "max": self.worst.probability_max,
                "mean": self.whole.probability_mean,
            },
            "logit_difference": self.worst.logits,
            "limit": self.limit,
            "floor": {name: value for name, value in asdict(self.floor).items() if isinstance(value, float)},
            "accuracy": accuracy if self.labelled else None,
            "other_size": self.other_size,
        }


def compare(
    original: TrainedModel, exported: Classifier, samples: list[Sample], floor: Difference
) -> Comparison:
    """Compares the file with the original on every image, starting with decoding."""
    found = Comparison(floor, limit(floor, dtype_of(original)))
    tie = 2 * found.limit
    for group in progress(_groups(original, exported, samples), "verifying", math.ceil(len(samples) / BULK)):
        readable = [each for each in group if each is not None]
        found.broken += len(group) - len(readable)
        for sample, ours, theirs in readable:
            if not np.array_equal(ours, theirs):
                found.other_pixels = sample.name
                return found
        if not readable:
            continue
        pixels = torch.from_numpy(np.stack([ours for _, ours, _ in readable]))
        wanted, here = answers(original, pixels), answers(exported, pixels)
        found.whole |= difference(wanted, here, tie)
        for (sample, _, _), one, other in zip(readable, wanted.argmax(1), here.argmax(1), strict=True):
            if sample.label is not None and sample.label >= 0:
                found.labelled += 1
                found.correct += int(one == sample.label)
                found.exported_correct += int(other == sample.label)
        if not found.by_batch:
            some = pixels[: 2 * max(BATCHES)]
            for batch in BATCHES:
                found.by_batch[batch] = difference(
                    answers(original, some, batch), answers(exported, some, batch), tie
                )
    return found


def _groups(
    original: TrainedModel, exported: Classifier, samples: Iterable[Sample]
) -> Iterator[list[tuple[Sample, NDArray[np.uint8], NDArray[np.uint8]] | None]]:
    """Each image as both see it after decoding and preprocessing; None if it cannot be read."""

    def seen(sample: Sample) -> tuple[Sample, NDArray[np.uint8], NDArray[np.uint8]] | None:
        try:
            picture = sample.read()
            return (
                sample,
                original.pixels(picture, sample.name),
                exported.pixels(picture, sample.name),
            )
        except (UserError, OSError):
            return None

    with ThreadPoolExecutor(usable_cores(), thread_name_prefix="drumline-export") as pool:
        remaining = iter(samples)
        while group := list(islice(remaining, BULK)):
            yield list(pool.map(seen, group))


def first_pixels(model: TrainedModel, samples: list[Sample]) -> Tensor:
    """The pixels of the first readable images, for the measurements before the export."""
    wanted, found = 2 * max(BATCHES), list[NDArray[np.uint8]]()
    for group in _groups(model, model, samples):
        found += [each[1] for each in group if each is not None]
        if len(found) >= wanted:
            break
    if not found:
        raise UserError(
            f"none of the {len(samples):,} images can be read, so the export cannot be verified",
            "give readable images with --images",
        )
    return torch.from_numpy(np.stack(found[:wanted]))


def try_other_size(original: TrainedModel, exported: ExportedModel, tolerance: float) -> str:
    """What the program does with images of a different size: `rejected`, `works`, `differs`, or `unchecked`."""
    if exported.export.format == "aoti":
        return "unchecked"
    size = exported.record.size + 32
    pixels = torch.randint(
        0, 256, (2, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    try:
        wanted = original.from_pixels(pixels)
    except (RuntimeError, ValueError, AssertionError):
        return "rejected"  # by the original itself
    try:
        outputs = exported.from_pixels(pixels)
    except Exception:  # each runtime raises its own
        return "rejected"
    return "works" if difference(wanted, outputs).logits <= tolerance else "differs"


def latency(original: Classifier, exported: Classifier, pixels: Tensor) -> tuple[float, float]:
    """Milliseconds for a batch on the device. The minimum over alternating rounds: other load only adds time."""
    times: tuple[list[float], list[float]] = ([], [])
    pixels = pixels.to(original.device)
    wait = torch.cuda.synchronize if pixels.is_cuda else lambda: None
    started = time.perf_counter()
    for round_ in range(100):
        for model, into in zip((original, exported), times, strict=True):
            begin = time.perf_counter()
            model.compute(pixels)
            wait()
            if round_:  # the first round warms up
                into.append(1000 * (time.perf_counter() - begin))
        if round_ >= 3 and time.perf_counter() - started > LATENCY_S:
            break
    return min(times[0]), min(times[1])


def _worse(one: float, other: float) -> float:
    """The larger value; NaN counts as infinite."""
    return max((math.inf if math.isnan(each) else each) for each in (one, other))
