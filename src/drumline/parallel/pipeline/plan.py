"""Measures where a model can be cut, and what a split into stages would gain.

Promises: `plan_split` is pure. A speed-up is an upper bound: crossings cost nothing in it.
Rejects images that the model cannot take, and more stages than the model can be cut into, before it measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from drumline.core.errors import UserError
from drumline.models.registry import IMAGENET, create_model, model_names
from drumline.parallel.pipeline.cut import trace, trainable_units
from drumline.parallel.pipeline.profile import Profile, Progress, cut_points, profile, time_split
from drumline.parallel.pipeline.split import (
    Memory,
    balance,
    check_stage_count,
    even_split,
    speed_up,
    stage_times,
)


@dataclass(frozen=True)
class Measurement:
    """The profile of a model, and what it was measured on."""

    profile: Profile
    device: str
    precision: str
    batch: int
    size: int
    returns: str
    """The type that the model returns in training. Only a Tensor can be trained as it is."""


@dataclass(frozen=True)
class StageSplit:
    """A model in a given number of stages, split by time and split evenly."""

    stages: int
    micro_batches: int
    names: tuple[str, ...]
    """Where each stage but the first begins."""
    shares: tuple[float, ...]
    """The fraction of the time that each stage takes."""
    balance: float
    """The time of the slowest stage over the mean."""
    speed_up: float
    """At most, over one device."""
    memory_bytes: tuple[int, ...]
    """Of each stage under 1F1B: activations in flight, parameters, gradients and momentum."""
    even_names: tuple[str, ...]
    even_balance: float
    even_speed_up: float

    @property
    def flags(self) -> str:
        """The flags for `drumline train`."""
        return f"--parallel.layout pipeline --parallel.stages {self.stages} --parallel.split {','.join(self.names)}"


def measure_cuts(
    name: str,
    classes: int,
    batch: int,
    size: int | None,
    device: torch.device,
    autocast: torch.dtype | None,
    channels_last: bool,
    *,
    repeats: int,
    inside_blocks: bool,
    stages: Sequence[int],
    progress: Progress = iter,
) -> Measurement:
    """Builds a model by name and measures the units between its cut points. `size` None is the model's usual size."""
    torch.manual_seed(0)
    model = create_model(name, classes).train()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    size = size or _usual_size(name, model)
    shape = (batch, 3, size, size)
    _check_size(name, model, size)
    traced = trace(model, sample=torch.empty(shape))
    points = trainable_units(traced, cut_points(traced, inside_blocks), model)
    check_stage_count(name, len(points), max(stages, default=1))
    try:
        measured = profile(
            traced,
            model,
            shape,
            device,
            autocast,
            repeats,
            progress,
            channels_last=channels_last,
            points=points,
        )
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{batch} images of {size} x {size} do not fit into the GPU's memory",
            f"set --batch to less than {batch}",
        ) from error
    return Measurement(
        measured,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        precision={None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[autocast],
        batch=batch,
        size=size,
        returns=traced.records[True].returns,
    )


def plan_split(measured: Profile, stages: int, micro_batches: int) -> StageSplit:
    """The split by time, compared with the even one."""
    names = [unit.name for unit in measured.units]
    chosen = time_split(measured, stages)
    by_time, by_count = tuple(names.index(name) for name in chosen), even_split(len(names), stages)
    times = measured.times
    total = sum(times) or 1.0
    memory = Memory(
        [unit.activation_bytes for unit in measured.units],
        [unit.parameter_bytes for unit in measured.units],
        micro_batches,
        limit=0,
    )
    edges = pairwise((0, *by_time, len(names)))
    return StageSplit(
        stages=stages,
        micro_batches=micro_batches,
        names=chosen,
        shares=tuple(time / total for time in stage_times(times, by_time)),
        balance=balance(times, by_time),
        speed_up=speed_up(times, by_time, micro_batches),
        memory_bytes=tuple(
            memory.of(stage, stages, first, last) for stage, (first, last) in enumerate(edges)
        ),
        even_names=tuple(names[first] for first in by_count),
        even_balance=balance(times, by_count),
        even_speed_up=speed_up(times, by_count, micro_batches),
    )


def _check_size(name: str, model: nn.Module, size: int) -> None:
    """Runs the model once on the CPU: its own error is clearer than that of a single unit."""
    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, 3, size, size))
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"{name} cannot take images of {size} x {size}: {type(error).__name__}: {reason}",
            "use a different --size",
        ) from error
    finally:
        model.train()


def _usual_size(name: str, model: nn.Module) -> int:
    """The side in pixels of the images that the model is usually trained on."""
    published = getattr(model, "pretrained_cfg", None)  # timm's
    size = published.get("input_size") if isinstance(published, dict) else None
    if size:
        return int(size[-1])
    return 32 if name in model_names() and name not in IMAGENET else 224
