"""Where the stages of any network are, found by running it once.

Promises: the forward that finds out leaves modes, buffers and random generators as they were. Refuses a place whose
module is not called. What a place is, see `foreign.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm

from drumline.core.errors import UserError

INPUT = ":input"


def find_places(model: nn.Module, example: Tensor) -> dict[str, str]:
    """Tap to place, found by running the model once on `example` in evaluation mode.

    Stages are the entries of timm's `feature_info` where there is one. Else they are the shallowest modules that
    end each size of the map: the last one before it halves, down to the last map. If there are more than four, the
    first is `stem`. `stageN.pre` is there where a stage ends in an activation module; `pooled` is the input of the
    linear layer that gives the logits. Maps are N x C x H x W; a model that spends less than a quarter of its
    layers on such maps (a vision transformer after its patches) has no stages.
    """
    record = probe(model, example)
    places = stage_places(model, record)
    places |= pre_places(model, record, places)
    return {tap: places[tap] for tap in sorted(places, key=tap_order)}


def stage_places(model: nn.Module, record: Record) -> dict[str, str]:
    """Stem, stages and pooled."""
    ends = _timm_ends(model, record) or _map_ends(model, record)
    names = [f"stage{number}" for number in range(1, len(ends) + 1)]
    if len(ends) > 4:
        names = ["stem", *names[:-1]]
    places = dict(zip(names, ends, strict=True))
    head = record.head
    if head is not None and head.name and head.entry is not None and head.entry.tensor.dim() == 2:
        places["pooled"] = head.name + INPUT
    return places


def pre_places(model: nn.Module, record: Record, places: Mapping[str, str]) -> dict[str, str]:
    """`stageN.pre` of the stages whose output an activation module gave."""
    pre = {}
    for tap, place in places.items():
        if not tap.startswith("stage") or tap.endswith(".pre"):
            continue
        stage = record.at(model, tap, place)
        for call in reversed(record.calls):
            if not _activates(call.module) or not stage.is_(call.leaving):
                continue
            if record.last(call.module) is call and call.entry is not None:
                pre[f"{tap}.pre"] = call.name + INPUT
                break
    return pre


def norm_name(tap: str, marks: Mapping[str, Mark], record: Record) -> str:
    """The name of the BatchNorm before a tap's activation; '' where none is known."""
    before = marks.get(f"{tap}.pre")
    mark = before or marks[tap]
    norms = [call for call in reversed(record.calls) if isinstance(call.module, _BatchNorm)]
    for call in norms:
        if call.leaving is not None and call.leaving.time <= mark.time and call.leaving.shares(mark):
            return call.name
    if before is None and not tap.endswith(".pre"):
        return ""
    number = int(tap.removesuffix(".pre").removeprefix("stage"))
    earlier = marks.get(f"stage{number - 1}", marks.get("stem"))
    since = earlier.time if earlier is not None else -1
    for call in norms:
        if since < call.start < mark.time and call.module.num_features == mark.tensor.shape[1]:
            return call.name
    return ""


def probe(model: nn.Module, example: Tensor, taps: bool = False) -> Record:
    """Runs the model once and writes down every call."""
    calls: list[Call] = []
    open_calls: list[Call] = []
    names = {module: name for name, module in model.named_modules()}
    clock = iter(range(1 << 62))

    def mark(values: object) -> Mark | None:
        tensor = first_tensor(values)
        return None if tensor is None else Mark(tensor, tensor._version, next(clock))

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entry = mark((*args, *kwargs.values()))
        call = Call(names[module], module, next(clock), entry)
        if open_calls:
            open_calls[-1].inner.append(call)
        open_calls.append(call)
        calls.append(call)

    def leave(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        open_calls.pop().leaving = mark(output)

    handles = []
    for module in names:
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with _undisturbed(model, example.device):
            # An example made in inference mode has no versions.
            image = example.clone() if example.is_inference() else example
            model(image, taps=True) if taps else model(image)
    finally:
        for handle in handles:
            handle.remove()
    return Record(calls, (example.shape[-2], example.shape[-1]))


@dataclass(frozen=True)
class Record:
    """What one forward did: all calls in the order of their start, the model's own first."""

    calls: list[Call]
    image: tuple[int, int]

    def last(self, module: nn.Module) -> Call | None:
        return next((call for call in reversed(self.calls) if call.module is module), None)

    def at(self, model: nn.Module, tap: str, place: str) -> Mark:
        """The tensor at a place."""
        call = self.last(model.get_submodule(place.removesuffix(INPUT)))
        mark = None if call is None else call.entry if place.endswith(INPUT) else call.leaving
        if mark is None:
            what = "is not called in a forward" if call is None else "has no tensor there"
            raise UserError(f"{tap}={place}: {place.removesuffix(INPUT)} {what}", fix="name another module")
        return mark

    @property
    def head(self) -> Call | None:
        logits = self.calls[0].leaving
        given = (c for c in reversed(self.calls) if isinstance(c.module, nn.Linear) and c.leaving is not None)
        return next((call for call in given if logits is not None and logits.is_(call.leaving)), None)

    def size(self, mark: Mark | None) -> tuple[int, int] | None:
        """Height and width of a map: four dimensions, the last two in the image's proportion (which N x H x W x C
        is not)."""
        if mark is None or mark.tensor.dim() != 4:
            return None
        (height, width), (full_height, full_width) = mark.tensor.shape[2:], self.image
        alike = abs(height - width * full_height / full_width) <= 1.5
        return (height, width) if alike and height <= full_height and width <= full_width else None


@dataclass(eq=False)
class Call:
    """One call of a module in the probe."""

    name: str
    module: nn.Module
    start: int
    entry: Mark | None
    leaving: Mark | None = None
    inner: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class Mark:
    """A tensor as it was at a moment of the probe."""

    tensor: Tensor
    version: int
    time: int

    def is_(self, other: Mark | None) -> bool:
        """The same memory, not written to in between."""
        return other is not None and self.version == other.version and self.shares(other)

    def shares(self, other: Mark) -> bool:
        """The same memory, seen in the same shape. The probe keeps every tensor, so no address comes twice."""
        mine, theirs = self.tensor, other.tensor
        return mine is theirs or (mine.data_ptr() == theirs.data_ptr() != 0 and mine.shape == theirs.shape)


def tap_order(tap: str) -> tuple[int, int, int]:
    """stem, stage1.pre, stage1, stage2.pre, ..., pooled."""
    if not tap.startswith("stage"):
        return (0 if tap == "stem" else 2, 0, 0)
    return (1, int(tap.removesuffix(".pre").removeprefix("stage")), 0 if tap.endswith(".pre") else 1)


def first_tensor(values: object) -> Tensor | None:
    """The first tensor of an output, or of the arguments of a call. What torch.fx traces counts as one."""
    if isinstance(values, Tensor | Proxy):
        return cast("Tensor", values)
    if isinstance(values, list | tuple):
        # A plain loop: torch.compile cannot follow a generator expression that binds a name.
        for value in values:
            tensor = first_tensor(value)
            if tensor is not None:
                return tensor
    return None


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards modes, buffers and random generators are as before."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, b, b.clone())
        for module in model.modules()
        for name, b in module._buffers.items()
        if b is not None
    ]
    devices = [device] if device.type not in ("cpu", "meta") else []
    kind = device.type if devices else "cuda"
    model.eval()
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices, device_type=kind):
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer
                if buffer.device.type != "meta" and not torch.equal(buffer, before):
                    buffer.copy_(before)


def _timm_ends(model: nn.Module, record: Record) -> list[str]:
    """timm's own list of feature maps, those that are N x C x H x W and not merely pooled."""
    info = getattr(model, "feature_info", None)
    entries = info if isinstance(info, list | tuple) else getattr(info, "info", ())
    modules = dict(model.named_modules())
    ends = []
    for entry in entries:
        name = entry.get("module", "") if isinstance(entry, dict) else ""
        call = record.last(modules[name]) if name and name in modules else None
        if call is None:
            continue
        before = entry.get("hook_type", "") == "forward_pre"
        mark = call.entry if before else call.leaving
        if mark is None or record.size(mark) is None or mark.tensor.shape[1] != entry.get("num_chs"):
            continue
        if before or _ends_a_stage(call.module):
            ends.append(name + INPUT if before else name)
    return ends


def _map_ends(model: nn.Module, record: Record) -> list[str]:
    """The module that ends each size of the map."""
    units: list[Call] = []
    _unfold(record.calls[0].inner, record, units)
    trunk: list[tuple[tuple[int, int], Call]] = []
    for unit in reversed(units):
        size = record.size(unit.leaving)
        assert size is not None
        # A map smaller than a later one is a side branch, such as squeeze-and-excitation's.
        if not trunk or size >= trunk[-1][0]:
            trunk.append((size, unit))
    runs: list[tuple[tuple[int, int], list[Call]]] = []
    for size, unit in reversed(trunk):
        if not runs or _shrinks(runs[-1][0], size, 0.7):
            pooled = size == (1, 1) and (not _layers(unit.module) or record.size(unit.entry) == size)
            if runs and pooled:
                break
            runs.append((size, []))
        runs[-1][1].append(unit)
    runs = [(size, run) for size, run in runs if any(_layers(unit.module) for unit in run)]
    if 4 * sum(_layers(unit.module) for _, run in runs for unit in run) < _layers(model):
        return []
    ends = (
        [unit.name for unit in run if _ends_a_stage(unit.module) and record.last(unit.module) is unit]
        for _, run in runs
    )
    return [names[-1] for names in ends if names]


def _unfold(calls: Iterable[Call], record: Record, units: list[Call]) -> None:
    """Appends the shallowest calls that give maps of one size each, in order; a call that spans several sizes, or
    turns a map into something else, is replaced by those inside it."""
    for call in calls:
        entry, leaving = record.size(call.entry), record.size(call.leaving)
        if leaving is None:
            if entry is not None:
                _unfold(call.inner, record, units)
            continue
        opened = False
        if entry is not None and call.inner:
            # One halving is a stage's own start, unless the larger map has had no layer yet.
            inside = {size for inner in call.inner if (size := record.size(inner.leaving)) is not None}
            fresh = not any(record.size(unit.leaving) == entry and _layers(unit.module) for unit in units)
            halved = _shrinks(entry, leaving, 0.7) and {entry, leaving} <= inside
            opened = _shrinks(entry, leaving, 0.35) or (fresh and halved)
        if opened:
            count = len(units)
            _unfold(call.inner, record, units)
            opened = any(record.size(unit.leaving) == leaving for unit in units[count:])
        if not opened:
            units.append(call)


def _shrinks(old: tuple[int, int], new: tuple[int, int], share: float) -> bool:
    return new[0] < share * old[0] or new[1] < share * old[1]


def _layers(module: nn.Module) -> int:
    """How many modules in it hold a matrix or a filter of their own."""
    return sum(any(p.dim() >= 2 for p in part.parameters(recurse=False)) for part in module.modules())


def _ends_a_stage(module: nn.Module) -> bool:
    """Not a pooling, a dropout or an identity."""
    return _activates(module) or next(module.parameters(), None) is not None


def _activates(module: nn.Module) -> bool:
    """An activation function of torch's or timm's."""
    home = type(module).__module__.rpartition(".")[2]
    no_map = isinstance(
        module, nn.MultiheadAttention | nn.Softmax | nn.Softmax2d | nn.LogSoftmax | nn.Softmin | nn.GLU
    )
    known = home in ("activation", "activations", "activations_me") and not no_map
    return known or any(
        isinstance(module, kind) for kind in (nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Hardswish)
    )
