"""Measures the units of a model one by one: forward and backward time, kept activations, and what crosses into each.

Promises: the given model stays untouched (parameters, gradients, buffers, modes), as do the random generators. A copy
is measured on real tensors, in rounds that run every unit in turn, so that a disturbance affects all of them. The
profile includes the spread of the rounds.
Rejects images that the model cannot take.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from drumline.core.arithmetic import leave_no_trace
from drumline.core.errors import UserError
from drumline.core.precision import FP32, Precision, autocast
from drumline.parallel.pipeline.cut import CutPoint, Traced, cut_points

NOISY = 0.05
"""A profile is noisy if the spread of its rounds is at least this."""
Progress = Callable[[Sequence[int]], Iterable[int]]
"""Iterates over the rounds, and may show their progress."""


@dataclass(frozen=True)
class ProfileOptions:
    """How a model is measured."""

    shape: tuple[int, ...]
    """Of a micro-batch of images: N x C x H x W."""
    device: torch.device
    precision: Precision = FP32
    channels_last: bool = False
    repeats: int = 9
    """Measured rounds, after two warm-up rounds."""
    progress: Progress = iter


@dataclass(frozen=True)
class UnitProfile:
    """The smallest piece of a model that can be a stage."""

    name: str
    """Where it begins, as a name for `Traced.split`. The first unit may have none."""
    forward_s: float
    backward_s: float
    parameters: int
    parameter_bytes: int
    activation_bytes: int
    """Kept for the backward of one micro-batch, except for what the unit before keeps already."""
    crossing_bytes: int
    """What a stage that begins here receives for each micro-batch. 0 for the first unit."""
    crossing_tensors: int

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Profile:
    """The units in order, measured together."""

    units: tuple[UnitProfile, ...]
    noise: float
    """The median distance of a round's total from the median total, as a fraction of it."""

    @property
    def times(self) -> list[float]:
        return [unit.seconds for unit in self.units]

    @property
    def crossings(self) -> list[int]:
        """Bytes in front of each unit but the first."""
        return [unit.crossing_bytes for unit in self.units[1:]]

    @property
    def noisy(self) -> str:
        """A warning, or ''."""
        if self.noise < NOISY:
            return ""
        return (
            f"noisy: the rounds differ by {100 * self.noise:.0f} % because something else uses this machine; "
            "ignore differences smaller than that"
        )


def profile(traced: Traced, options: ProfileOptions, points: Sequence[CutPoint] | None = None) -> Profile:
    """Measures the traced model in the modes that it is in. A unit reaches from one of `points` to the next; the
    default is `cut_points(traced)`."""
    assert options.repeats >= 1
    device = options.device
    with leave_no_trace(devices=[device]), torch.enable_grad():
        units = _units(traced, cut_points(traced) if points is None else points, device)
        images = torch.randn(options.shape, device=device)
        if options.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        rounds: list[list[tuple[float, float]]] = []
        kept: list[_Kept] = []
        for number in options.progress(range(2 + options.repeats)):
            taken = _Round(images, device, options.precision, counts=number == 0)
            times = [taken.through(unit) for unit in units]
            if number == 0:
                kept = taken.kept
            if number >= 2:
                rounds.append([(forward(), backward()) for forward, backward in times])
    totals = [sum(forward + backward for forward, backward in taken) for taken in rounds]
    middle = median(totals)
    parameters = dict(traced.model.named_parameters(remove_duplicate=False))
    profiles = []
    for number, (unit, held) in enumerate(zip(units, kept, strict=True)):
        used = [parameters[name] for name in unit.parameters]
        profiles.append(
            UnitProfile(
                name=unit.name,
                forward_s=median(taken[number][0] for taken in rounds),
                backward_s=median(taken[number][1] for taken in rounds),
                parameters=sum(parameter.numel() for parameter in used),
                parameter_bytes=sum(parameter.nbytes for parameter in used),
                activation_bytes=held.activation_bytes,
                crossing_bytes=held.crossing_bytes if number else 0,
                crossing_tensors=held.crossing_tensors if number else 0,
            )
        )
    noise = median(abs(total - middle) for total in totals) / middle if middle else 0.0
    return Profile(tuple(profiles), noise)


@dataclass(frozen=True)
class _Unit:
    name: str
    module: nn.Module
    parameters: tuple[str, ...]
    lasting: frozenset[int]
    """Storages of parameters and buffers, which are not kept for the backward."""


@dataclass(frozen=True)
class _Kept:
    activation_bytes: int
    crossing_bytes: int
    crossing_tensors: int


_Timer = Callable[[], float]
"""Returns the measured seconds. On a GPU, waits until they are known."""


def _units(traced: Traced, points: Sequence[CutPoint], device: torch.device) -> list[_Unit]:
    """The units, bound to a copy of the model on the device."""
    own = copy.deepcopy(traced.model).to(device)
    for parameter in own.parameters():
        parameter.grad = None
    lasting = frozenset(_storage(tensor) for tensor in (*own.parameters(), *own.buffers()))
    segments = traced.split([point.name for point in points[1:]])
    return [_Unit(segment.name, segment.bind(own), segment.parameters, lasting) for segment in segments]


class _Round:
    """One micro-batch through all units. Each unit's backward follows its forward, with a random gradient."""

    def __init__(self, images: Tensor, device: torch.device, precision: Precision, counts: bool) -> None:
        self.kept: list[_Kept] = []
        self._inputs = [images]
        self._device, self._precision, self._counts = device, precision, counts
        self._counted: set[int] = set()
        """Storages among the inputs that earlier units keep."""

    def through(self, unit: _Unit) -> tuple[_Timer, _Timer]:
        """Runs one unit. Returns timers of its forward and its backward."""
        inputs, received = [_as_received(tensor) for tensor in self._inputs], self._inputs
        saved: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in unit.lasting:
                saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
            # Detached: an output that its own graph holds would never be freed.
            return tensor.detach()

        try:
            if self._counts:
                with saved_tensors_hooks(count, lambda tensor: tensor):
                    forward, outputs = self._forward(unit, inputs)
            else:
                forward, outputs = self._forward(unit, inputs)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            shape = " x ".join(str(side) for side in inputs[0].shape)
            raise UserError(
                f"the model cannot take these images: at {unit.name or 'its beginning'}, with input {shape}: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                "use the size the model was made for, and at least 2 images if it has BatchNorm",
            ) from error
        if self._counts:
            self._count(received, inputs, outputs, saved)
        backward = self._backward(outputs)
        self._inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs]
        return forward, backward

    def _forward(self, unit: _Unit, inputs: Sequence[Tensor]) -> tuple[_Timer, list[Tensor]]:
        with autocast(self._device, self._precision), _timed(self._device) as timer:
            outputs = unit.module(*inputs)
        return timer, list(_tensors(outputs))

    def _backward(self, outputs: Sequence[Tensor]) -> _Timer:
        ends = [tensor for tensor in outputs if tensor.requires_grad]
        if not ends:
            return lambda: 0.0
        gradients = [torch.randn_like(tensor) for tensor in ends]
        with _timed(self._device) as timer:
            torch.autograd.backward(ends, gradients)
        return timer

    def _count(
        self,
        received: Sequence[Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        saved: dict[int, int],
    ) -> None:
        # A stage receives its inputs as new tensors. Inside a stage they are the outputs of the unit before.
        before = {
            _storage(own)
            for theirs, own in zip(received, inputs, strict=True)
            if _storage(theirs) in self._counted
        }
        self.kept.append(
            _Kept(
                activation_bytes=sum(size for storage, size in saved.items() if storage not in before),
                crossing_bytes=sum(tensor.numel() * tensor.element_size() for tensor in received),
                crossing_tensors=len(received),
            )
        )
        # `before`: a skip connection through this unit is already counted.
        self._counted = {
            found for tensor in outputs if (found := _storage(tensor)) in saved or found in before
        }


def _as_received(tensor: Tensor) -> Tensor:
    """A copy as a stage receives it. Not a leaf, since a unit may write into its input."""
    if not tensor.requires_grad:
        return tensor.clone()
    return tensor.detach().requires_grad_().clone()


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors of a module's output, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def _timed(device: torch.device) -> Iterator[_Timer]:
    """Times the block. On a GPU with events on its stream: the host does not wait."""
    if device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()

        def seconds() -> float:
            last.synchronize()
            return first.elapsed_time(last) / 1000

        yield seconds
        last.record()
        return
    begun = time.perf_counter()
    ended = begun
    yield lambda: ended - begun
    ended = time.perf_counter()
